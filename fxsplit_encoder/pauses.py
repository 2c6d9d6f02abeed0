"""Points of long work at which requests may go first.

Capturing compiles, runs, times and records for seconds. `capture(wait=False)` does the same while requests
are served: what uses the device holds the manager's turn, and gives it up at each `pause`. In the foreground,
without `pausing_by`, a pause does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class StoppedError(BaseException):
    """The work was stopped before it was done. A `BaseException`, so that what handles the errors of kernels
    lets it pass.
    """


class Scheduler(Protocol):
    """Does work between requests."""

    seconds_paused: float
    """Time spent waiting for its turn."""

    def pause(self) -> None:
        """Lets requests go first, and returns with the turn.

        Raises:
            StoppedError: the work was canceled.
        """

    def turn(self) -> AbstractContextManager[object]:
        """Holds the turn, so that no request is served inside."""

    def capture(self, work: Callable[[], Result]) -> Result:
        """Runs work that records a CUDA graph while no other thread waits for the device, which would fail
        and the recording with it; returns its result.
        """


_scheduler: ContextVar[Scheduler | None] = ContextVar("fxsplit_encoder_scheduler", default=None)


@contextlib.contextmanager
def pausing_by(scheduler: Scheduler) -> Iterator[None]:
    """Inside, on this thread, work pauses as a scheduler says."""
    token = _scheduler.set(scheduler)
    try:
        yield
    finally:
        _scheduler.reset(token)


def seconds_paused() -> float:
    """Time that the work on this thread has waited for its turn."""
    return 0.0 if (scheduler := _scheduler.get()) is None else scheduler.seconds_paused


def pause() -> None:
    """Lets requests go first, where work is done between them."""
    if (scheduler := _scheduler.get()) is not None:
        scheduler.pause()


def has_turn() -> AbstractContextManager[object]:
    """Inside, no request is served, where requests are served during the rest."""
    return contextlib.nullcontext() if (scheduler := _scheduler.get()) is None else scheduler.turn()


def run_capture(work: Callable[[], Result]) -> Result:
    """Runs work that records a CUDA graph; returns its result."""
    scheduler = _scheduler.get()
    if scheduler is None:
        return work()
    context = copy_context()  # perhaps for another thread
    context.run(_scheduler.set, None)
    return scheduler.capture(lambda: context.run(work))
