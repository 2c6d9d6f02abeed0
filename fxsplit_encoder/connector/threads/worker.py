"""A thread with an encoder: takes batches, encodes them, and has their rows copied to where they will lie."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fxsplit_encoder.connector.books.encoding import Arrival, Batch, Worker, WorkerStatus
from fxsplit_encoder.connector.books.tickets import Entry, Event
from fxsplit_encoder.connector.interfaces import (
    DeviceEncoder,
    FeatureEncoder,
    PreparedItem,
    PrioritizedEncoder,
    SlicingEncoder,
)
from fxsplit_encoder.connector.states import encode_each, failure_of
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.connector.threads.core import Core
from fxsplit_encoder.errors import ConnectorError, EncoderLostError

T = TypeVar("T")


class Landing(Generic[T]):
    """Brings flights to their end, in order. Its thread starts with the first that has to be waited for."""

    def __init__(self, land: Callable[[T], None], on_fault: Callable[[], None], name: str) -> None:
        self._land = land
        self._on_fault = on_fault
        self._name = name
        self._flights: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_added = self._num_landed = 0
        self.fault: BaseException | None = None
        """What ended the thread."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is waited for; asked by the thread that adds."""
        return self._num_added == self._num_landed

    def add(self, flight: T) -> None:
        """One more."""
        self._num_added += 1
        self._flights.put(flight)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while (flight := self._flights.get()) is not None:
                self._land(flight)
                del flight  # and the tensors of it, which may be large
                self._num_landed += 1
        except BaseException as error:
            self.fault = error
            self._on_fault()

    def finish(self) -> None:
        """Returns once everything that was added has come to its end, or the thread by a fault."""
        if self._thread is not None:
            self._flights.put(None)
            self._thread.join()


_QUEUED = 2
"""Slices that a device has at most: it computes one while the host makes the next."""


class Slices:
    """Encodes batches of which some items are cut.

    Args:
        core: the books.
        worker: whose thread calls this.
        encoder: that cuts.
        copies: makes events.
        let_pass: gives the device a batch of no more than this cost, if one is due.
    """

    def __init__(
        self,
        core: Core,
        worker: Worker,
        encoder: SlicingEncoder,
        copies: Copies,
        let_pass: Callable[[float], None],
    ) -> None:
        self._core = core
        self._worker = worker
        self._encoder = encoder
        self._copies = copies
        self._let_pass = let_pass

    def encode(
        self,
        batch: Batch,
        items: Sequence[PreparedItem],
        encode: Callable[[Sequence[PreparedItem]], Sequence[Tensor]],
    ) -> list[Tensor]:
        """The features of items: those that are not cut together, then each of the others in slices.

        Args:
            batch: that they are in.
            items: some of it.
            encode: of several items at once.

        Raises:
            EncoderLostError: the device failed meanwhile.
        """
        most_cost = self._core.books.parts.config.max_slice_cost
        if most_cost is None or batch.cost <= most_cost:
            return list(encode(items))
        cut = {item: self._encoder.slices(item, most_cost) for item in items}
        whole = [item for item in items if len(cut[item]) == 1]
        features = dict(zip(whole, encode(whole), strict=True)) if whole else {}
        slices = [(item, part) for item in items if item not in features for part in cut[item]]
        rows: dict[PreparedItem, list[Tensor]] = {item: [] for item, _ in slices}
        events: list[Event] = []
        for number, (item, part) in enumerate(slices):
            begin = self._core.books.parts.clock()
            rows[item] += encode([part])
            if number + 1 < len(slices):
                events.append(self._copies.mark(rows[item][-1].device))
                self._between(batch, events, begin)
                self._let_pass(most_cost)
        features |= {item: torch.cat(parts) for item, parts in rows.items()}
        return [features[item] for item in items]

    def _between(self, batch: Batch, events: list[Event], begin: float) -> None:
        share = self._core.books.parts.config.max_busy_share
        try:
            while len(events) >= (_QUEUED if share == 1 else 1):
                events.pop(0).synchronize()
        except RuntimeError as error:  # no item is to blame
            raise EncoderLostError(f"its device failed: {error}") from error
        if share < 1:
            self._rest(batch, begin, share)

    def _rest(self, batch: Batch, begin: float, share: float) -> None:
        """As long as a slice asks for, unless the worker is told to end."""
        core, clock = self._core, self._core.books.parts.clock
        with core.lock:
            self._worker.finish_slice(batch, begin, clock(), share)
            while self._worker.status is WorkerStatus.RUNNING:
                if (left := self._worker.rests_until - clock()) <= 0:
                    break
                core.encode_work.wait(left)


logger = logging.getLogger(__name__)


class WorkerThread:
    """One worker."""

    def __init__(
        self,
        core: Core,
        worker: Worker,
        encoder: FeatureEncoder,
        copies: Copies,
        on_lost: Callable[[Worker], None],
    ) -> None:
        self._core = core
        self.worker = worker
        self._encoder = encoder
        self._copies = copies
        self._on_lost = on_lost
        self._slices: Slices | None = None
        if isinstance(encoder, SlicingEncoder):
            self._slices = Slices(core, worker, encoder, copies, self._let_pass)
        self._landing = Landing(self._land, self._wake, f"connector-landing-{worker.name}")
        self.thread = threading.Thread(target=self._run, name=f"connector-{worker.name}", daemon=True)

    def _run(self) -> None:
        try:
            self._encoder.start()
            with self._copies.own_stream(_device_of(self._encoder), _priority_of(self._encoder)):
                self._set_status(WorkerStatus.STARTING, WorkerStatus.RUNNING)
                self._serve()
            self._set_status(WorkerStatus.DRAINING, WorkerStatus.STOPPED)
        except BaseException:
            # Whatever ended this thread must not end the work that it had.
            logger.warning("%s is lost", self.worker.name, exc_info=True)
            self._landing.finish()  # what the device was given before it may still come to its end
            self._on_lost(self.worker)
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._encoder.close()
        except Exception:
            logger.warning("%s: its encoder could not be closed", self.worker.name, exc_info=True)

    def _wake(self) -> None:
        with self._core.lock:
            self._core.encode_work.notify_all()

    def _set_status(self, before: WorkerStatus, after: WorkerStatus) -> None:
        with self._core.change():
            if self.worker.status is before:
                self.worker.status = after
            self._core.wake_all()

    # --- the loop

    def _serve(self) -> None:
        """Keeps as many batches in flight as settings allow; ends once the worker takes no more."""
        while True:
            batch = self._next()
            if batch is None:
                break
            self._launch(batch)
            self._follow(batch)
        self._landing.finish()
        self._check_landing()

    def _next(self) -> Batch | None:
        """What to do; None: nothing any more."""
        core, books = self._core, self._core.books
        with core.lock:
            while True:
                self._check_landing()
                taken = books.encoding.take(self.worker)
                if taken.batch is not None:
                    core.encode_work.notify_all()  # others may take the rest
                    return taken.batch
                if self.worker.status is not WorkerStatus.RUNNING:
                    return None
                core.encode_work.wait(taken.wait_s)

    # --- batches

    def _launch(self, batch: Batch) -> None:
        num_splits = 0

        def count_split() -> None:
            nonlocal num_splits
            num_splits += 1

        def encode(items: Sequence[PreparedItem]) -> Sequence[Tensor]:
            if self._slices is None:
                return self._encode(items)
            return self._slices.encode(batch, items, self._encode)

        prepared = [entry.prepared for entry in batch.entries]
        outputs = encode_each(encode, prepared, count_split)  # type: ignore[arg-type]
        checked = [_checked(entry, rows) for entry, rows in zip(batch.entries, outputs, strict=True)]
        for entry, rows in zip(batch.entries, checked, strict=True):
            if isinstance(rows, ConnectorError):
                batch.failures[entry] = rows
            else:  # copied by the same stream, and so there once the batch's events have passed
                total = rows.detach().sum(dtype=torch.float32)
                batch.totals[entry] = total.to("cpu", non_blocking=True)
        with self._core.change() as books:
            books.parts.stats.split_batches += num_splits
            arrivals = books.encoding.place(batch, checked)
        batch.events += map(self._copies.mark, {each.rows.device for each in arrivals})
        for arrival in arrivals:
            if arrival.is_copied:
                self._copy(batch, arrival)

    def _let_pass(self, most_cost: float) -> None:
        """Gives the device another batch between slices of one, if one is due that costs no more."""
        with self._core.lock:
            batch = self._core.books.encoding.take(self.worker, most_cost).batch
        if batch is None:
            return
        try:
            self._launch(batch)
            self._follow(batch)
        except EncoderLostError:
            raise
        except Exception as error:  # not the fault of what is encoded in slices
            raise EncoderLostError(f"{self.worker.name} cannot go on: {error}") from error

    def _encode(self, items: Sequence[PreparedItem]) -> Sequence[Tensor]:
        outputs = self._encoder.encode(items)
        if len(outputs) != len(items):
            raise RuntimeError(f"the encoder returned {len(outputs)} features for {len(items)} items")
        return outputs

    def _copy(self, batch: Batch, arrival: Arrival) -> None:
        try:
            if arrival.buffer is None:
                arrival.buffer = self._allocate(arrival.capacity)
                with self._core.change() as books:
                    if not books.encoding.attach(batch, arrival, arrival.buffer):
                        return
            arrival.feature.rows, event = self._copies.to_host(arrival.rows, arrival.buffer)
            batch.events.append(event)
        except Exception as error:
            batch.failures[arrival.entry] = failure_of(error, "encoder")

    def _allocate(self, num_bytes: int) -> Any:
        with self._core.lock:
            buffers = self._core.books.parts.storage.buffers
            was_dropped, buffers.was_dropped = buffers.was_dropped, False
        if was_dropped:
            self._copies.give_back()
        return self._copies.allocate(num_bytes)

    def _follow(self, batch: Batch) -> None:
        """Batches come to their end in order; where the encoder waits for its device, at once."""
        if self._landing.is_empty and _is_over(batch.events):
            self._land(batch)
            return
        with self._core.change() as books:
            books.encoding.launched(batch)
        self._landing.add(batch)

    def _check_landing(self) -> None:
        """A fault of the device that shows while it is waited for is this worker's."""
        if self._landing.fault is not None:
            raise self._landing.fault

    def _land(self, batch: Batch) -> None:
        for event in batch.events:
            event.synchronize()
        with self._core.change() as books:
            books.encoding.publish(batch)


def _device_of(encoder: FeatureEncoder) -> torch.device | None:
    device: Any = encoder.device if isinstance(encoder, DeviceEncoder) else None
    return torch.device(device) if isinstance(device, str | torch.device) else None


def _priority_of(encoder: FeatureEncoder) -> int:
    return encoder.stream_priority if isinstance(encoder, PrioritizedEncoder) else 0


def _is_over(events: Sequence[Event]) -> bool:
    return all(event.query() for event in events)


def _checked(entry: Entry, rows: Any) -> Tensor | ConnectorError:
    """The rows of an entry, if they are what memory was reserved for."""
    if isinstance(rows, ConnectorError):
        return rows
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
        return ConnectorError("the encoder did not return rows", "mismatch", retryable=False)
    if rows.shape[0] != entry.num_tokens or rows.nbytes != entry.num_bytes:
        return ConnectorError(
            f"expected {entry.num_tokens} rows of {entry.num_bytes} bytes in all; the encoder returned "
            f"{tuple(rows.shape)} of {rows.nbytes} bytes",
            "mismatch",
            retryable=False,
        )
    return rows
