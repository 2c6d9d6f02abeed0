"""A lock that gives requests priority over background work, and the comparison of kernels in such work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from fxsplit_encoder.kernels.choice import Unmeasured, collecting
from fxsplit_encoder.pauses import Scheduler, StoppedError, has_turn, pausing_by

_Result = TypeVar("_Result")

_POLL_SECONDS = 0.05
"""Poll interval of a step that is not due, in seconds."""


class Turns:
    """A reentrant lock that gives requests, which use it as a context, priority over steps of other work.

    A step begins after `quiet` seconds without a request; under a constant load after so many `requests` or
    `seconds`, and then before later requests. So a request waits for one step at most.
    """

    def __init__(self, requests: int = 16, seconds: float = 1.0, quiet: float = 0.01) -> None:
        self._requests = requests
        self._seconds = seconds
        self._quiet = quiet
        self._lock = threading.Lock()
        self.owner: int | None = None
        """The thread that holds the lock, which alone sets it."""
        self._depth = 0
        self._passed = 0
        """Number of requests; guarded by the lock."""
        self._last_end = 0.0
        self.lent: tuple[Future[Any], Callable[[], Any]] | None = None
        """Set in `lend`, taken by a thread with the lock."""
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self.num_waiting = 0
        self._due: int | None = None
        """The thread whose step comes before later requests."""

    def __enter__(self) -> Turns:
        me = threading.get_ident()
        if self.owner == me:
            self._depth += 1
            return self
        # Of a manager without such work, and of most requests with it, this is all that it costs.
        if self._due is not None or not self._lock.acquire(blocking=False):
            self._wait()
        self.owner, self._depth = me, 1
        self._passed += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            if self.lent is not None and kind is None and self._depth == 1:
                self._do_lent()
        finally:
            self._depth -= 1
            if not self._depth:
                self._last_end = time.perf_counter()
                self.owner = None
                self._lock.release()

    def _wait(self) -> None:
        with self._changed:
            self.num_waiting += 1
            self._changed.wait_for(lambda: self._due is None)
        self._lock.acquire()
        with self._changed:
            self.num_waiting -= 1
            self._changed.notify_all()

    @contextmanager
    def step(
        self, is_stopped: Callable[[], bool] = lambda: False, *, at_once: bool = False
    ) -> Iterator[None]:
        """Holds the lock for one step, with `at_once` without waiting for quiet; StoppedError: canceled."""
        me = threading.get_ident()
        assert self.owner != me, "a step is begun by whoever serves nobody"
        self._await_turn(me, is_stopped, at_once=at_once)
        try:
            self._lock.acquire()
            self.owner, self._depth = me, 1
            try:
                if is_stopped():
                    raise StoppedError
                yield
            finally:
                self.owner = None
                self._lock.release()
        finally:
            with self._changed:
                self._due = None
                self._changed.notify_all()

    def lend(self, work: Callable[[], _Result], is_stopped: Callable[[], bool] = lambda: False) -> _Result:
        """Runs work on a thread that has just served a request or calls `assist`; returns its result or
        raises its error. One thread may call it at a time. StoppedError: canceled before it started.
        """
        assert self.lent is None, "one thread lends work"
        future: Future[_Result] = Future()
        self.lent = future, work
        while not future.done():
            if is_stopped() and future.cancel():
                self.lent = None
                raise StoppedError
            with contextlib.suppress(TimeoutError):
                future.exception(_POLL_SECONDS)
        return future.result()

    def assist(self) -> None:
        """Runs the work that waits in `lend`, if any."""
        if self.lent is not None:
            with self:
                pass

    def _do_lent(self) -> None:
        lent, self.lent = self.lent, None
        if lent is None:
            return
        future, work = lent
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # the boundary of the thread that waits for the result
            if isinstance(error, Exception | StoppedError):
                future.set_exception(error)
                return
            message = f"{type(error).__name__} while it worked for another thread"
            future.set_exception(RuntimeError(message))
            raise  # an interrupt is meant for this thread

    def _await_turn(self, me: int, is_stopped: Callable[[], bool], *, at_once: bool) -> None:
        begin, passed = time.perf_counter(), self._passed
        with self._changed:
            while True:
                if is_stopped():
                    raise StoppedError
                if self._due is None:
                    now = time.perf_counter()
                    busy = self.owner is not None or bool(self.num_waiting)
                    is_quiet = not busy and now - self._last_end >= self._quiet
                    share = self._passed - passed >= self._requests or now - begin >= self._seconds
                    if is_quiet or share or (at_once and not self.num_waiting):
                        self._due = me
                        return
                self._changed.wait(min(self._quiet or _POLL_SECONDS, _POLL_SECONDS))


class WorkBetween(Scheduler):
    """A scheduler of `pauses` that holds the lock of `Turns` and releases it at each pause.

    Args:
        with_turn: context while the lock is held.
        on_other_thread: context of work that another thread does.
        lends: whether CUDA graphs are recorded by `Turns.lend`: at any other time a thread that serves
            requests may synchronize the device, which no thread may while another records.
    """

    def __init__(
        self,
        turns: Turns,
        is_stopped: Callable[[], bool],
        with_turn: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        on_other_thread: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        *,
        at_once: bool = False,
        lends: bool = False,
    ) -> None:
        self._turns = turns
        self._is_stopped = is_stopped
        self._with_turn = with_turn
        self._on_other_thread = on_other_thread
        self._at_once = at_once
        self.lends = lends
        self._held = contextlib.ExitStack()
        self._has_turn = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the lock, reentrantly; StoppedError: canceled."""
        if self._has_turn:
            yield
            return
        self._take()
        try:
            yield
        finally:
            self._give()

    def pause(self) -> None:
        """Releases the lock, if this thread holds it, and takes it again; StoppedError: canceled."""
        if self._is_stopped():
            raise StoppedError
        if self._has_turn:
            self._give()
            self._take()

    def capture(self, work: Callable[[], _Result]) -> _Result:
        """Runs work with the lock, if `lends` by `Turns.lend`; StoppedError: canceled."""
        if not self.lends:
            with self.turn():
                return work()
        begin, seconds = time.perf_counter(), 0.0

        def by_another() -> _Result:
            nonlocal seconds
            if self._is_stopped():
                raise StoppedError
            start = time.perf_counter()
            try:
                with self._on_other_thread(), self._with_turn():
                    return work()
            finally:
                seconds = time.perf_counter() - start

        had_turn = self._has_turn
        self._give()
        try:
            return self._turns.lend(by_another, self._is_stopped)
        finally:
            self.seconds_paused += time.perf_counter() - begin - seconds
            if had_turn:
                self._take()

    def _take(self) -> None:
        begin = time.perf_counter()
        with contextlib.ExitStack() as taken:
            taken.enter_context(self._turns.step(self._is_stopped, at_once=self._at_once))
            taken.enter_context(self._with_turn())
            self._held = taken.pop_all()
        self._has_turn = True
        self.seconds_paused += time.perf_counter() - begin

    def _give(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._held.close()


def compare_between_requests(run: Callable[[], None], device: torch.device) -> None:
    """Compares the kernels of all calls of a run. Checking results, which may compile, takes no lock."""
    unmeasured: Unmeasured = {}
    with has_turn(), collecting(unmeasured):
        run()
    # Of its own, so that requests do not queue behind it.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        for measurements, shape in unmeasured:
            measurements.compare(shape)
    if stream is not None:
        # While a capture is open torch frees none of the blocks that it keeps for later.
        torch.cuda.empty_cache()


class _WhileCompiling(Scheduler):
    """Compares kernels at each pause of a run; stops it when no other process compiles kernels."""

    def __init__(self, unmeasured: Unmeasured, is_compiling: Callable[[], bool]) -> None:
        self._unmeasured = unmeasured
        self._is_compiling = is_compiling
        self._known = 0

    def pause(self) -> None:
        new = list(self._unmeasured)[self._known :]
        self._known += len(new)
        for measurements, shape in new:
            self._check()
            measurements.compare_unawaited(shape)
        self._check()

    def _check(self) -> None:
        if not self._is_compiling():
            raise StoppedError


def compare_meanwhile(run: Callable[[], None], is_compiling: Callable[[], bool]) -> None:
    """Compares the kernels of every class of calls that a run meets while other processes compile kernels."""
    unmeasured: Unmeasured = {}
    scheduler = _WhileCompiling(unmeasured, is_compiling)
    with contextlib.suppress(StoppedError), collecting(unmeasured), pausing_by(scheduler):
        scheduler.pause()
        run()
        scheduler.pause()
