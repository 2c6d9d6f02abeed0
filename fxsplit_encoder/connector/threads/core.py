"""The books behind their lock, and the thread that watches the time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from fxsplit_encoder.connector.books.books import Books
from fxsplit_encoder.connector.books.encoding import Worker
from fxsplit_encoder.encode_queue.batch_thread import Clock


class Core:
    """One lock, and conditions over it for each kind of thread. Nothing is called back while it is held."""

    def __init__(self, lock: threading.Lock, books: Books) -> None:
        self.lock = lock
        self.books = books
        self.config, self.now = books.holdings.config, books.holdings.clock
        self.cpu_work = threading.Condition(lock)
        self.encode_work = threading.Condition(lock)
        self.dtypes: dict[str, torch.dtype] = {}
        """Of rows, by modality, once some were encoded."""
        self.on_hang: Callable[[Worker, bool], None] = lambda worker, is_running: None
        """Called with a worker that hangs and still runs, to give it up."""
        self.clock = Clock(lock, self.books.next_deadline, self._expire, self.now, "connector-clock")

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
                if jobs := self.books.preparation.num_jobs:
                    self.cpu_work.notify(jobs)
                if holdings.to_encode:
                    self.encode_work.notify_all()
                self.clock.look()
        for future in woken:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def wake_all(self) -> None:
        """Have every thread look again; called with the lock."""
        self.cpu_work.notify_all()
        self.encode_work.notify_all()

    def _expire(self) -> None:
        """Fail what was not ready in time, free what devices are through with, give up who hangs: whether or
        not anybody asks for steps.
        """
        with self.change() as books:
            books.expire()
            hung = books.encoding.hung_workers()
        for worker in hung:
            self.on_hang(worker, True)
