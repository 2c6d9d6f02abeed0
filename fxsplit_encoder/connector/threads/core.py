"""The books behind their lock, and the thread that waits for devices."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import torch

from fxsplit_encoder.connector.books.books import Books
from fxsplit_encoder.connector.books.encoding import Worker
from fxsplit_encoder.encode_queue.batch_thread import Clock

logger = logging.getLogger(__name__)


class Core:
    """One lock, and conditions over it for each kind of thread. Nothing is called back while it is held."""

    def __init__(self, lock: threading.Lock, books: Books) -> None:
        self.lock = lock
        self.books = books
        self.config, self.now = books.holdings.config, books.holdings.clock
        self.cpu_work = threading.Condition(lock)
        self.encode_work = threading.Condition(lock)
        self.quarantine_filled = threading.Condition(lock)
        self.cpu_threads: frozenset[threading.Thread] = frozenset()
        """Those that do CPU work."""
        self.is_stopping = False
        """Whether threads are to end once they have nothing to do."""
        self.dtypes: dict[str, torch.dtype] = {}
        """Of rows, by modality, once some were encoded."""
        self.on_hang: Callable[[Worker, bool], None] = lambda worker, is_running: None
        """Called with a worker that hangs and still runs, to give it up."""
        self.clock = Clock(lock, self.books.next_deadline, self._expire, self.now, "connector-clock")
        self.warden = threading.Thread(target=self._watch_devices, name="connector-warden", daemon=True)

    @contextlib.contextmanager
    def change(self) -> Iterator[Books]:
        """The books, to be changed; threads and tickets that the change concerns are woken afterwards."""
        with self.lock:
            try:
                yield self.books
            finally:
                self.books.settle()
                holdings = self.books.holdings
                woken, holdings.woken = holdings.woken, []
                self._wake_threads()
        for future in woken:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def stop(self) -> None:
        """Tell all threads to end once they have nothing to do."""
        with self.lock:
            self.is_stopping = True
            self.clock.stop()
            self.wake_all()

    def wake_all(self) -> None:
        """Have every thread look again; called with the lock."""
        for condition in (self.cpu_work, self.encode_work, self.quarantine_filled):
            condition.notify_all()

    def _wake_threads(self) -> None:
        holdings = self.books.holdings
        # A thread of these that changes the books looks itself for what to do next.
        if (jobs := self.books.preparation.num_jobs - (threading.current_thread() in self.cpu_threads)) > 0:
            self.cpu_work.notify(jobs)
        if holdings.to_encode:
            self.encode_work.notify_all()
        if holdings.storage.quarantine:
            self.quarantine_filled.notify_all()
        self.clock.look()

    def _expire(self) -> None:
        """Fail what was not ready in time, whether or not anybody asks for steps; give up who hangs."""
        with self.change() as books:
            books.expire()
            hung = books.encoding.hung_workers()
        for worker in hung:
            self.on_hang(worker, True)

    def _watch_devices(self) -> None:
        """Free memory that was let go of while a device used it, once the device is through with it."""
        while True:
            with self.lock:
                features = list(self.books.holdings.storage.quarantine)
                events = [event for feature in features for event in feature.read_events]
                if not events:
                    if self.is_stopping and not features:
                        return
                    self.quarantine_filled.wait()
                    continue
            for event in events:
                try:
                    event.synchronize()
                except RuntimeError:
                    # The device is gone, and with it whatever used the memory.
                    logger.warning("a device that was to be waited for is lost", exc_info=True)
            with self.change():
                pass
