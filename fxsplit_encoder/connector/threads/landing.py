"""Waiting for what a device was given, on a thread of its own: a worker gives it more meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Landing(Generic[T]):
    """Brings flights to their end, in order. Its thread starts with the first that has to be waited for.

    Args:
        land: waits for one, and publishes what came of it.
        on_fault: called once, on the thread, if `land` raised; it ends then.
        name: of the thread.
    """

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
