"""The books behind their lock, and the two threads that wait for deadlines and for devices."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from threading import TIMEOUT_MAX

from fxsplit_encoder.connector.books.books import Books
from fxsplit_encoder.connector.books.parts import Parts
from fxsplit_encoder.connector.books.tickets import wake


class Core:
    """One lock, and conditions over it for each kind of thread. Nothing is called back while it is held."""

    def __init__(self, lock: threading.Lock, parts: Parts) -> None:
        self.lock = lock
        self.books = Books(parts)
        self.cpu_work = threading.Condition(lock)
        self.encode_work = threading.Condition(lock)
        self.deadline_came_closer = threading.Condition(lock)
        self.quarantine_filled = threading.Condition(lock)
        self.cpu_threads: frozenset[threading.Thread] = frozenset()
        """Those that do CPU work."""
        self.is_stopping = False
        """Whether threads are to end once they have nothing to do."""
        self.awaited_deadline: float | None = None
        """The one that the clock waits for."""

    @contextlib.contextmanager
    def change(self) -> Iterator[Books]:
        """The books, to be changed; afterwards everyone is told whom it concerns."""
        with self.lock:
            try:
                yield self.books
            finally:
                self.books.settle()
                parts = self.books.parts
                waiters = [waiter for ticket in parts.woken for waiter in ticket.take_waiters()]
                parts.woken.clear()
                self._wake_threads()
        wake(waiters)

    def stop(self) -> None:
        """Tells all threads to end once they have nothing to do."""
        with self.lock:
            self.is_stopping = True
            self.wake_all()

    def wake_all(self) -> None:
        """Has every thread look again; called with the lock."""
        for condition in (
            self.cpu_work,
            self.encode_work,
            self.deadline_came_closer,
            self.quarantine_filled,
        ):
            condition.notify_all()

    def _wake_threads(self) -> None:
        parts = self.books.parts
        # A thread of these that changes the books looks itself for what to do next.
        if (jobs := self.books.preparation.num_jobs - (threading.current_thread() in self.cpu_threads)) > 0:
            self.cpu_work.notify(jobs)
        if parts.to_encode:
            self.encode_work.notify_all()
        if parts.storage.quarantine:
            self.quarantine_filled.notify_all()
        deadline = self.books.next_deadline()
        if deadline is not None and (self.awaited_deadline is None or deadline < self.awaited_deadline):
            self.deadline_came_closer.notify_all()


logger = logging.getLogger(__name__)


class Clock:
    """Fails what was not ready in time, whether or not anybody asks for steps."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.thread = threading.Thread(target=self._run, name="connector-clock", daemon=True)

    def _run(self) -> None:
        core, books = self._core, self._core.books
        while True:
            with core.lock:
                if core.is_stopping:
                    return
                core.awaited_deadline = books.next_deadline()
                remaining = None
                if core.awaited_deadline is not None:
                    remaining = core.awaited_deadline - books.parts.clock()
                if remaining is None or remaining > 0:
                    # Further deadlines than a wait may have are looked at again.
                    core.deadline_came_closer.wait(None if remaining is None else min(remaining, TIMEOUT_MAX))
                    continue
            with core.change():
                books.expire()


class Warden:
    """Frees memory that was let go of while a device used it, once the device is through with it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.thread = threading.Thread(target=self._run, name="connector-warden", daemon=True)

    def _run(self) -> None:
        core = self._core
        while True:
            with core.lock:
                features = list(core.books.parts.storage.quarantine)
                events = [event for feature in features for event in feature.read_events]
                if not events:
                    if core.is_stopping and not features:
                        return
                    core.quarantine_filled.wait()
                    continue
            for event in events:
                try:
                    event.synchronize()
                except RuntimeError:
                    # The device is gone, and with it whatever used the memory.
                    logger.warning("a device that was to be waited for is lost", exc_info=True)
            with core.change():
                pass
