"""The workers: threads with an encoder each, started, drained, and started again when one is lost."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.connector.books.encoding import LIVE, Batch, Worker, WorkerStatus
from fxsplit_encoder.connector.books.tickets import Entry, Event, Feature, capacity_of
from fxsplit_encoder.connector.interfaces import MODALITIES, FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.states import Residence, failure_of
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.connector.threads.core import Core
from fxsplit_encoder.encode_queue.batch_thread import BatchThread
from fxsplit_encoder.errors import ConnectorError, EncoderLostError, InputError
from fxsplit_encoder.messages import names_of, shown

EncoderFactory = Callable[[], FeatureEncoder]

MOST_RESTARTS = 3
"""How often in a row a worker that was lost is started again before it is given up."""


class Pool:
    """Workers with one encoder each, which batches go to by predicted cost."""

    def __init__(
        self,
        core: Core,
        factories: Sequence[EncoderFactory],
        encoders: Sequence[FeatureEncoder],
        copies: Copies,
    ) -> None:
        self.core, self.copies = core, copies
        core.on_hang = self.lost
        self._threads: dict[str, _WorkerThread] = {}
        self._started: list[threading.Thread] = []
        """Threads that may still run, also those whose places others have taken."""
        for number, (factory, encoder) in enumerate(zip(factories, encoders, strict=True)):
            modalities = frozenset(each for each in MODALITIES if encoder.row_bytes(each) is not None)
            worker = core.books.encoding.add_worker(f"worker {number}", modalities)
            self._threads[worker.name] = _WorkerThread(self, worker, factory, encoder)
        self._workers = core.books.encoding.workers
        for each in self._threads.values():
            each.thread.start()
            self._started.append(each.thread)

    def stage(self, item: PreparedItem) -> tuple[PreparedItem, float]:
        """An item as encoders read it soonest, and its cost, as the first worker of its modality says."""
        serving = [worker for worker in self._workers.values() if item.modality in worker.modalities]
        live = [worker for worker in serving if worker.status in LIVE]
        encoder = self._threads[(live or serving)[0].name].encoder
        item = encoder.stage(item)
        return item, encoder.predict_cost(item)

    # --- one worker

    def drain(self, name: str) -> None:
        """See `Connector.drain_worker`; InputError: no worker has this name."""
        with self.core.change():
            worker = self._worker(name)
            if worker.status in LIVE:
                worker.status = WorkerStatus.DRAINING
            self.core.wake_all()

    def restart(self, name: str) -> None:
        """See `Connector.restart_worker`; InputError: no worker has this name, or the connector is closed."""
        with self.core.change() as books:
            worker = self._worker(name)
            if books.is_closed:
                raise InputError(f"{name}: expected an open connector; it is closed")
            if self._threads[name].thread.is_alive():
                books.encoding.lose_worker(worker, is_running=True)
            self._succeed(worker)

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            raise InputError(f"worker: expected one of {names_of(self._workers)}; got {shown(name)}")
        return self._workers[name]

    def lost(self, worker: Worker, is_running: bool) -> None:
        """Start another worker in its place, after the thread has ended, or while it runs and hangs."""
        with self.core.change() as books:
            was_serving = worker.status in LIVE
            books.encoding.lose_worker(worker, is_running=is_running)
            is_current = self._workers[worker.name] is worker
            if is_current and was_serving and not books.is_closed and worker.num_losses < MOST_RESTARTS:
                self._succeed(worker, worker.num_losses + 1)
            self.core.wake_all()

    def _succeed(self, worker: Worker, num_losses: int = 0) -> None:
        """Start a worker in place of another; called with the lock, so that every thread has begun."""
        self.core.books.holdings.stats.worker_restarts += 1
        successor = self.core.books.encoding.add_worker(worker.name, worker.modalities, num_losses)
        before = self._threads[worker.name]
        started = _WorkerThread(self, successor, before.make, before.encoder, is_made=False)
        self._threads[worker.name] = started
        started.thread.start()
        self._started = [*filter(threading.Thread.is_alive, self._started), started.thread]
        self.core.wake_all()

    # --- the end

    def threads(self) -> list[threading.Thread]:
        """All that may still run. One that ends by a fault may add another before it has ended."""
        with self.core.lock:
            return list(self._started)


def make_encoders(factories: Sequence[EncoderFactory]) -> list[FeatureEncoder]:
    """The first encoder of each worker; those that were made are closed if another cannot be."""
    made: list[FeatureEncoder] = []
    with contextlib.ExitStack() as closing:
        for make in factories:
            made.append(make())
            closing.callback(made[-1].close)
        closing.pop_all()
    return made


def row_bytes_of(encoders: Sequence[FeatureEncoder]) -> dict[Modality, int]:
    """Bytes of rows by modality, where an encoder takes it; InputError: there is none, or two disagree."""
    if not encoders:
        raise InputError("encoders: expected at least one; got none")
    sizes: dict[Modality, int] = {}
    for encoder, modality in itertools.product(encoders, MODALITIES):
        size = encoder.row_bytes(modality)
        if size is not None and size != (known := sizes.setdefault(modality, size)):
            got = f"{sorted([size, known])} bytes"
            raise InputError(f"encoders: expected rows of one size for every {modality}; got {got}")
    return sizes


_QUEUED = 2
"""Slices that a device has at most: it computes one while the host makes the next."""


class _WorkerThread(BatchThread[Batch]):
    """Makes, starts, calls and closes the encoder of one worker."""

    def __init__(
        self, pool: Pool, worker: Worker, make: EncoderFactory, encoder: FeatureEncoder, is_made: bool = True
    ) -> None:
        super().__init__(f"connector-{worker.name}", pool.core.encode_work)
        self._core, self._copies, self._on_lost = pool.core, pool.copies, pool.lost
        self.worker, self.make = worker, make
        self.encoder = encoder
        """Until this thread has made its own, its predecessor's, which stages items."""
        self._is_made = is_made

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        if not self._is_made:
            self.encoder = self.make()
            self._is_made = True
        self.encoder.start()
        with self._copies.own_stream(self.encoder.device, self.encoder.stream_priority):
            self._set_status(WorkerStatus.STARTING, WorkerStatus.RUNNING)
            yield
        self._set_status(WorkerStatus.DRAINING, WorkerStatus.STOPPED)

    def lost(self, error: BaseException) -> None:
        self._on_lost(self.worker, False)

    def close(self) -> None:
        if self._is_made:
            self.encoder.close()

    def _set_status(self, before: WorkerStatus, after: WorkerStatus) -> None:
        with self._core.change():
            if self.worker.status is before:
                self.worker.status = after
            self._core.wake_all()

    # --- batches

    def take(self) -> Batch | None:
        with self.work:
            while True:
                self.check()
                taken = self._core.books.encoding.take(self.worker)
                if isinstance(taken, Batch):
                    self._core.clock.look()
                    self.work.notify_all()  # others may take the rest
                    return taken
                if self.worker.status is not WorkerStatus.RUNNING:
                    return None
                self.work.wait(taken)

    def launch(self, batch: Batch) -> None:
        batch.outputs = self._outputs(batch)

    def split(self, batch: Batch, error: Exception) -> Sequence[Batch]:
        with self._core.change() as books:
            return books.encoding.split(batch, failure_of(error, "encoder"))

    def launched(self, batch: Batch) -> bool:
        """Have rows checked and copied; what fails here is no item's fault, and ends the worker."""
        self._place(batch)
        with self._core.change() as books:
            books.encoding.launched(batch)
        return all(event.query() for event in batch.events)

    def land(self, batch: Batch) -> None:
        for event in batch.events:
            event.synchronize()
        with self._core.change() as books:
            books.encoding.publish(batch)

    def _outputs(self, batch: Batch) -> Sequence[Any]:
        most_cost = self._core.config.max_slice_cost
        if most_cost is None or batch.cost <= most_cost:
            return self._encode(batch.inputs)
        cut = {item: self.encoder.slices(item, most_cost) for item in batch.inputs}
        return self._encode_slices(batch, cut)

    def _encode(self, items: Sequence[PreparedItem]) -> Sequence[Any]:
        outputs = self.encoder.encode(items)
        if len(outputs) != len(items):
            raise RuntimeError(f"the encoder returned {len(outputs)} features for {len(items)} items")
        return outputs

    def _mismatch(self, entry: Entry, rows: Any) -> ConnectorError | None:
        """Why rows are not what was announced and memory was reserved for, if they are not."""
        dtypes, got = self._core.dtypes, shown(rows)
        if isinstance(rows, torch.Tensor):
            got = f"{tuple(rows.shape)} of {rows.dtype}"
            if rows.dim() == 2 and len(rows) == entry.num_tokens and rows.nbytes == entry.num_bytes:
                if rows.dtype == dtypes.setdefault(entry.modality, self.encoder.dtype or rows.dtype):
                    return None
        expected = f"{entry.num_tokens} rows of {dtypes.get(entry.modality)}, {entry.num_bytes} bytes in all"
        return ConnectorError(f"expected {expected}; the encoder returned {got}", "mismatch", retryable=False)

    def _place(self, batch: Batch) -> None:
        placeable: dict[Entry, Tensor] = {}
        for entry, rows in zip(batch.entries, batch.outputs, strict=True):
            if (error := self._mismatch(entry, rows)) is not None:
                batch.failures[entry] = error
                continue
            placeable[entry] = rows
            total = rows.detach().sum(dtype=torch.float32)
            # Copied by the same stream, and so there once the batch's events have passed.
            batch.totals[entry] = total.to("cpu", non_blocking=True)
        with self._core.change() as books:
            placed = books.encoding.place(batch, placeable)
        batch.events += map(self._copies.mark, {placeable[entry].device for entry in placed})
        for entry, feature in placed.items():
            if feature.residence is Residence.HOST:
                self._copy(batch, entry, feature, placeable[entry])

    def _copy(self, batch: Batch, entry: Entry, feature: Feature, rows: Tensor) -> None:
        try:
            feature.rows, event = self._copies.to_host(rows, self._allocate(capacity_of(rows.nbytes)))
            batch.events.append(event)
        except (MemoryError, RuntimeError) as error:
            batch.failures[entry] = failure_of(error, "encoder")

    def _allocate(self, num_bytes: int) -> Any:
        """A host buffer. The allocator keeps those that were let go; they count as free memory, too."""
        with self._core.lock:
            storage = self._core.books.holdings.storage
            is_too_much = storage.host.used + storage.idle_bytes > self._core.config.host_bytes
            storage.idle_bytes = 0 if is_too_much else max(0, storage.idle_bytes - num_bytes)
        if is_too_much:
            self._copies.give_back()
        return self._copies.allocate(num_bytes)

    # --- slices of items that are encoded apart

    def _encode_slices(self, batch: Batch, cut: dict[PreparedItem, Sequence[PreparedItem]]) -> list[Tensor]:
        """Encode the items that are not cut together, then each of the others in slices."""
        whole = [item for item, parts in cut.items() if len(parts) == 1]
        features = dict(zip(whole, self._encode(whole), strict=True)) if whole else {}
        slices = [(item, part) for item, parts in cut.items() if item not in features for part in parts]
        rows: dict[PreparedItem, list[Tensor]] = {item: [] for item, _ in slices}
        events: list[Event] = []
        for number, (item, part) in enumerate(slices):
            begin = self._core.now()
            rows[item] += self._encode([part])
            if number + 1 < len(slices):
                events.append(self._copies.mark(rows[item][-1].device))
                self._between_slices(batch, events, begin)
        features |= {item: torch.cat(parts) for item, parts in rows.items()}
        return [features[item] for item in cut]

    def _between_slices(self, batch: Batch, events: list[Event], begin: float) -> None:
        """Wait until the device has few slices, rest as settings say, and let another batch pass."""
        config = self._core.config
        try:
            while len(events) >= (_QUEUED if config.max_busy_share == 1 else 1):
                events.pop(0).synchronize()
            if config.max_busy_share < 1:
                self._rest(begin)
            batch.progressed_at = self._core.now()
            with self._core.lock:
                other = self._core.books.encoding.take(self.worker, config.max_slice_cost)
            if isinstance(other, Batch):
                self.run(other)
        except RuntimeError as error:  # of the device: no item is to blame
            raise EncoderLostError(f"{self.worker.name} cannot go on: {error}") from error

    def _rest(self, begin: float) -> None:
        """Rest for as long as a slice asks for, or until the worker has to end."""
        core, clock = self._core, self._core.now
        with core.lock:
            self.worker.finish(begin, clock(), core.config.max_busy_share, is_slice=True)
            while self.worker.status is WorkerStatus.RUNNING:
                if (left := self.worker.rests_until - clock()) <= 0:
                    break
                self.work.wait(left)
