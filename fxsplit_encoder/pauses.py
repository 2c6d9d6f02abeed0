"""Points at which `capture(wait=False)` releases the manager's lock, so that requests are served while it
compiles, runs, times and records for seconds. In the foreground, without `pausing_by`, a pause does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from typing import TypeVar

Result = TypeVar("Result")


class StoppedError(BaseException):
    """The work was canceled. A `BaseException`: handlers of the errors of kernels let it pass."""


class Scheduler:
    """Runs work between requests; this one runs it in the foreground, where nothing waits."""

    seconds_paused = 0.0
    """Time spent waiting for the lock."""

    def pause(self) -> None:
        """Releases the lock and takes it again; StoppedError if the work was canceled."""

    def turn(self) -> AbstractContextManager[object]:
        """Holds the lock, so that no request is served inside."""
        return contextlib.nullcontext()

    def capture(self, work: Callable[[], Result]) -> Result:
        """Runs work that records a CUDA graph, while no other thread waits for the device: that would fail,
        and the recording with it.
        """
        return work()


_FOREGROUND = Scheduler()
_scheduler: ContextVar[Scheduler] = ContextVar("fxsplit_encoder_scheduler", default=_FOREGROUND)


@contextlib.contextmanager
def pausing_by(scheduler: Scheduler) -> Iterator[None]:
    """Inside, work on this thread pauses by a scheduler."""
    token = _scheduler.set(scheduler)
    try:
        yield
    finally:
        _scheduler.reset(token)


def seconds_paused() -> float:
    """Seconds that the work on this thread has waited for the lock."""
    return _scheduler.get().seconds_paused


def is_between_requests() -> bool:
    """Whether the work on this thread leaves requests to other threads in between."""
    return _scheduler.get() is not _FOREGROUND


def pause() -> None:
    """Lets requests be served, if the work runs between them."""
    _scheduler.get().pause()


def has_turn() -> AbstractContextManager[object]:
    """Holds the lock inside, if the work runs between requests."""
    return _scheduler.get().turn()


def run_capture(work: Callable[[], Result]) -> Result:
    """Runs work that records a CUDA graph, by the scheduler if there is one."""
    if not is_between_requests():
        return work()
    scheduler = _scheduler.get()
    context = copy_context()  # perhaps for another thread
    context.run(_scheduler.set, _FOREGROUND)
    return scheduler.capture(lambda: context.run(work))
