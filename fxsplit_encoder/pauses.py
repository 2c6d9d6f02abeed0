"""Points at which `capture(wait=False)` releases the manager's lock, so that requests are served while it
compiles, runs, times and records for seconds. In the foreground, without `pausing_by`, a pause does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar


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

    def recording(self) -> AbstractContextManager[object]:
        """Holds the lock to record a CUDA graph, while no thread that serves waits for the device: that would
        fail, and the recording with it.
        """
        return contextlib.nullcontext()


FOREGROUND = Scheduler()
_scheduler: ContextVar[Scheduler] = ContextVar("fxsplit_encoder_scheduler", default=FOREGROUND)


@contextlib.contextmanager
def pausing_by(chosen: Scheduler) -> Iterator[None]:
    """Inside, work on this thread pauses by a scheduler."""
    token = _scheduler.set(chosen)
    try:
        yield
    finally:
        _scheduler.reset(token)


def scheduler() -> Scheduler:
    """Returns the scheduler of the work on this thread."""
    return _scheduler.get()


def pause() -> None:
    """Lets requests be served, if the work runs between them."""
    _scheduler.get().pause()


def has_turn() -> AbstractContextManager[object]:
    """Holds the lock inside, if the work runs between requests."""
    return _scheduler.get().turn()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Holds the lock inside, where nothing pauses, as recording a CUDA graph needs."""
    with _scheduler.get().recording(), pausing_by(FOREGROUND):
        yield
