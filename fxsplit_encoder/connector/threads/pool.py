"""The workers: started, drained, started again when one is lost."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from fxsplit_encoder.connector.books.encoding import LIVE, Worker, WorkerStatus
from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem, StagingEncoder
from fxsplit_encoder.connector.threads.copies import Copies
from fxsplit_encoder.connector.threads.core import Core
from fxsplit_encoder.connector.threads.worker import WorkerThread
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import names_of, shown

logger = logging.getLogger(__name__)

EncoderFactory = Callable[[], FeatureEncoder]

MODALITIES: tuple[Modality, ...] = get_args(Modality)


class Pool:
    """Workers with one encoder each, which batches go to by predicted cost."""

    def __init__(
        self,
        core: Core,
        factories: Sequence[EncoderFactory],
        encoders: Sequence[FeatureEncoder],
        copies: Copies,
    ) -> None:
        self._core = core
        self._copies = copies
        self._factories: dict[str, EncoderFactory] = {}
        self._encoders: dict[str, FeatureEncoder] = {}
        self._threads: dict[str, WorkerThread] = {}
        self._given_up: list[WorkerThread] = []
        """Threads that may still run, though others have taken their place."""
        for number, (factory, encoder) in enumerate(zip(factories, encoders, strict=True)):
            worker = Worker(f"worker {number}", modalities_of(encoder))
            self._factories[worker.name], self._encoders[worker.name] = factory, encoder
            core.books.encoding.add_worker(worker)
            self._threads[worker.name] = self._thread(worker)

    @property
    def _workers(self) -> Mapping[str, Worker]:
        """Those of today, by name."""
        return self._core.books.encoding.workers

    def _thread(self, worker: Worker) -> WorkerThread:
        return WorkerThread(self._core, worker, self._encoders[worker.name], self._copies, self._lost)

    def start(self) -> None:
        """Starts every worker; they take batches as soon as their encoders are ready."""
        for thread in self._threads.values():
            thread.thread.start()

    @property
    def statuses(self) -> dict[str, WorkerStatus]:
        """How each worker is, by name."""
        return {name: worker.status for name, worker in self._workers.items()}

    def stage(self, item: PreparedItem) -> tuple[PreparedItem, float]:
        """An item as its encoders read it soonest, and what encoding it costs, as the first worker says that
        serves its modality. Encoders of a connector are alike.
        """
        encoder = self._encoder_of(item)
        if isinstance(encoder, StagingEncoder):
            item = encoder.stage(item)
        return item, encoder.predict_cost(item)

    def _encoder_of(self, item: PreparedItem) -> FeatureEncoder:
        serving = [worker for worker in self._workers.values() if item.modality in worker.modalities]
        live = [worker for worker in serving if worker.status in LIVE]
        return self._encoders[(live or serving)[0].name]

    # --- one worker

    def drain(self, name: str) -> None:
        """The worker finishes what it has in hand, takes nothing more, and closes its encoder.

        Raises:
            InputError: no worker has this name.
        """
        with self._core.change():
            worker = self._worker(name)
            if worker.status in LIVE:
                worker.status = WorkerStatus.DRAINING
            self._core.wake_all()

    def restart(self, name: str) -> None:
        """A new worker takes the place of one that has stopped, is lost, or does not come to an end. What the
        latter has in hand goes to others, and its thread is left to itself.

        Raises:
            InputError: no worker has this name, or the connector is closed.
        """
        with self._core.change() as books:
            worker = self._worker(name)
            if books.is_closed:
                raise InputError(f"{name}: expected an open connector; it is closed")
            if self._threads[name].thread.is_alive():
                books.encoding.lose_worker(worker, is_running=True)
                left = [each for each in self._given_up if each.thread.is_alive()]
                self._given_up = [*left, self._threads[name]]
            successor = self._succeed(worker)
            self._core.wake_all()
        self._start(successor)

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            raise InputError(f"worker: expected one of {names_of(self._workers)}; got {shown(name)}")
        return self._workers[name]

    def _lost(self, worker: Worker) -> None:
        """At the end of a thread that a fault has ended."""
        with self._core.change() as books:
            was_serving = worker.status in LIVE
            books.encoding.lose_worker(worker, is_running=False)
            successor, most = None, books.parts.config.max_worker_restarts
            is_current = self._workers[worker.name] is worker
            if is_current and was_serving and not books.is_closed and worker.num_losses < most:
                successor = self._succeed(worker)
                successor.num_losses = worker.num_losses + 1
            self._core.wake_all()
        if successor is not None:
            self._start(successor)

    def _succeed(self, worker: Worker) -> Worker:
        """The record of a worker in place of another; called with the lock."""
        successor = Worker(worker.name, worker.modalities)
        self._core.books.encoding.add_worker(successor)
        self._core.books.parts.stats.worker_restarts += 1
        return successor

    def _start(self, worker: Worker) -> None:
        try:
            self._encoders[worker.name] = self._factories[worker.name]()
        except Exception:
            logger.warning("%s: no encoder could be made", worker.name, exc_info=True)
            self._lost(worker)
            return
        with self._core.lock:  # so that whoever waits for all threads sees none that has not begun
            thread = self._threads[worker.name] = self._thread(worker)
            thread.thread.start()

    # --- the end

    def stop(self) -> None:
        """Every worker finishes what it has in hand, and ends."""
        for name in self._workers:
            self.drain(name)

    def threads(self) -> list[threading.Thread]:
        """All that may still run. One that ends by a fault may add another before it has ended."""
        with self._core.lock:
            self._given_up = [each for each in self._given_up if each.thread.is_alive()]
            return [each.thread for each in (*self._threads.values(), *self._given_up)]


def modalities_of(encoder: FeatureEncoder) -> frozenset[str]:
    """What an encoder encodes."""
    return frozenset(modality for modality in MODALITIES if encoder.row_bytes(modality) is not None)


def make_encoders(factories: Sequence[EncoderFactory]) -> list[FeatureEncoder]:
    """The first encoder of each worker; those that were made are closed if another cannot be."""
    made: list[FeatureEncoder] = []
    try:
        for make in factories:
            made.append(make())
    except BaseException:
        for encoder in made:
            with contextlib.suppress(Exception):
                encoder.close()
        raise
    return made


def row_bytes_of(encoders: Sequence[FeatureEncoder]) -> dict[Modality, int | None]:
    """Bytes of a feature's rows by modality; None: nobody encodes it.

    Raises:
        InputError: two encoders do not agree, or there is none.
    """
    if not encoders:
        raise InputError("encoders: expected at least one; got none")
    sizes: dict[Modality, int | None] = {}
    for modality in MODALITIES:
        known = {size for encoder in encoders if (size := encoder.row_bytes(modality)) is not None}
        if len(known) > 1:
            raise InputError(
                f"encoders: expected rows of one size for every {modality}; got {sorted(known)} bytes"
            )
        sizes[modality] = next(iter(known), None)
    return sizes
