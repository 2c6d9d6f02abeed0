"""Points of long work at which requests may go first.

Capturing compiles, runs, times and records for seconds. `capture(wait=False)` does the same while requests
are served: what uses the device has the manager's turn, and gives it up at each `pause`. The work is plain
calls; `pausing_by` says what a pause does. In the foreground, where nothing says it, a pause does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class StoppedError(BaseException):
    """The work was stopped before it was done. Not an `Exception`, as `asyncio.CancelledError` is none: what
    takes whatever a kernel raises for its failure must let this pass.
    """


class Scheduler(Protocol):
    """Does work between requests."""

    seconds_paused: float
    """What it has waited for its turn so far."""

    def pause(self) -> None:
        """Lets requests go first, and returns with the turn.

        Raises:
            StoppedError: the work is not wanted any more.
        """

    def turn(self) -> AbstractContextManager[object]:
        """Inside, work that requests are served during has the turn, and none is served."""

    def capture(self, work: Callable[[], Result]) -> Result:
        """Has work that records a CUDA graph done where no other thread waits for the device during it, which
        would fail and the recording with it; returns its result.
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
    """What the work on this thread has waited for its turn so far."""
    return 0.0 if (scheduler := _scheduler.get()) is None else scheduler.seconds_paused


def pause() -> None:
    """Lets requests go first, where work is done between them."""
    if (scheduler := _scheduler.get()) is not None:
        scheduler.pause()


def has_turn() -> AbstractContextManager[object]:
    """Inside, no request is served, where requests are served during the rest."""
    return contextlib.nullcontext() if (scheduler := _scheduler.get()) is None else scheduler.turn()


def run_capture(work: Callable[[], Result]) -> Result:
    """Does work that records a CUDA graph; returns its result."""
    scheduler = _scheduler.get()
    if scheduler is None:
        return work()
    context = copy_context()  # perhaps for another thread
    context.run(_scheduler.set, None)
    return scheduler.capture(lambda: context.run(work))
