"""A lock that gives requests priority over background steps, and the comparison of kernels in such steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from fxsplit_encoder.kernels import Unmeasured, collecting
from fxsplit_encoder.parts import Parts, each_within

_Result = TypeVar("_Result")

_POLL_SECONDS = 0.05
"""How often a step that is not due looks again, for a stop among others."""


class StoppedError(Exception):
    """A step was not begun since nobody wants it any more."""


class Turns:
    """The lock of whoever serves requests, which other work shares in steps.

    Used as a context by requests, in any thread; one that has it may enter again. A step waits until nobody
    has asked for a while; under a load without pauses it is due nevertheless after so many requests or
    seconds, and then goes before those that come later. So a request waits for one step at most, and steps
    go on whatever the load. Work that only a thread which serves requests may do is lent to the next one.

    Args:
        requests: that go before a step.
        seconds: that a step waits at most, for the request that is running then and no other.
        quiet: seconds without a request after which a step may begin.
    """

    def __init__(self, requests: int = 16, seconds: float = 1.0, quiet: float = 0.01) -> None:
        self._requests = requests
        self._seconds = seconds
        self._quiet = quiet
        self._lock = threading.Lock()
        self._owner: int | None = None
        """The thread that has the lock; it alone changes this to and from its own number."""
        self._depth = 0
        self._passed = 0
        """Requests so far; changed by whoever has the lock."""
        self._last_end = 0.0
        self._lent: tuple[Future[Any], Callable[[], Any]] | None = None
        """Set by the one that lends, taken by whoever has the lock."""
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._waiting = 0
        self._due: int | None = None
        """The thread whose step comes next: requests that come now wait for it."""

    def __enter__(self) -> Turns:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return self
        # Of a manager without such work, and of most requests with it, this is all that it costs.
        if self._due is not None or not self._lock.acquire(blocking=False):
            self._wait()
        self._owner, self._depth = me, 1
        self._passed += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            if self._lent is not None and kind is None and self._depth == 1:
                self._do_lent()
        finally:
            self._depth -= 1
            if not self._depth:
                self._last_end = time.perf_counter()
                self._owner = None
                self._lock.release()

    def _wait(self) -> None:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._due is None)
        self._lock.acquire()
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()

    @contextmanager
    def step(
        self, is_stopped: Callable[[], bool] = lambda: False, *, at_once: bool = False
    ) -> Iterator[None]:
        """One step of other work, alone.

        Args:
            is_stopped: whether the step is not wanted any more.
            at_once: whether it goes before the requests that come, after those that wait already.

        Raises:
            StoppedError: it is not wanted; nothing was done.
        """
        me = threading.get_ident()
        assert self._owner != me, "a step is begun by whoever serves nobody"
        self._await_turn(me, is_stopped, at_once=at_once)
        try:
            self._lock.acquire()
            self._owner, self._depth = me, 1
            try:
                if is_stopped():
                    raise StoppedError
                yield
            finally:
                self._owner = None
                self._lock.release()
        finally:
            with self._changed:
                self._due = None
                self._changed.notify_all()

    def lend(self, work: Callable[[], _Result], is_stopped: Callable[[], bool] = lambda: False) -> _Result:
        """Has some work done by a thread that serves a request, right after one, or by one that waits for all
        work in `assist`; returns its result. One thread may lend at a time.

        Raises:
            StoppedError: it is not wanted; nothing was done.
            Exception: what the work raised.
        """
        assert self._lent is None, "one thread lends work"
        future: Future[_Result] = Future()
        self._lent = future, work
        while not future.done():
            if is_stopped() and future.cancel():
                self._lent = None
                raise StoppedError
            with contextlib.suppress(TimeoutError):
                future.exception(_POLL_SECONDS)
        return future.result()

    def assist(self) -> None:
        """Does the work that was lent, if there is any, as after a request."""
        if self._lent is not None:
            with self:
                pass

    def _do_lent(self) -> None:
        lent, self._lent = self._lent, None
        if lent is None:
            return
        future, work = lent
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # an interrupt is meant for this thread
            future.set_exception(RuntimeError(f"{type(error).__name__} while it worked for another thread"))
            raise

    def _await_turn(self, me: int, is_stopped: Callable[[], bool], *, at_once: bool) -> None:
        begin, passed = time.perf_counter(), self._passed
        with self._changed:
            while True:
                if is_stopped():
                    raise StoppedError
                if self._due is None:
                    now = time.perf_counter()
                    busy = self._owner is not None or bool(self._waiting)
                    is_quiet = not busy and now - self._last_end >= self._quiet
                    share = self._passed - passed >= self._requests or now - begin >= self._seconds
                    if is_quiet or share or (at_once and not self._waiting):
                        self._due = me
                        return
                self._changed.wait(min(self._quiet or _POLL_SECONDS, _POLL_SECONDS))


_END: Any = object()

Around = Callable[[], AbstractContextManager[object]]


def compare_between_requests(
    runs: Parts[None], device: torch.device, *, step: Around, beside: Around
) -> Parts[None]:
    """Compares the kernels of every class of calls that some runs meet, a part each time that it is asked for
    one.

    A run, and the timing of one kernel on one call, is a step. Checking a kernel's results is none: it may
    compile the kernel first, for seconds, and other work on the device does not change it.

    Args:
        runs: a run a part.
        step, beside: what is around a step, and around the rest, while requests are served.
    """
    unmeasured: Unmeasured = {}

    @contextlib.contextmanager
    def collecting_step() -> Iterator[None]:
        with step(), collecting(unmeasured):
            yield

    yield from each_within(collecting_step, runs)
    # Of its own, so that requests do not queue behind it.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    for measurements, shape in unmeasured:
        parts = measurements.comparing(shape)
        coming = next(parts, None)
        while coming is not None:
            with step() if coming == "time" else beside():
                if stream is not None and coming == "time":
                    # A step has the current stream wait for the requests before it.
                    stream.wait_stream(torch.cuda.current_stream(device))
                    stream.synchronize()
                with torch.cuda.stream(stream):
                    coming = next(parts, None)
            yield None
    if stream is not None:
        # While a capture is open torch frees none of the blocks that it keeps for later.
        torch.cuda.empty_cache()


def compare_meanwhile(runs: Parts[None], is_compiling: Callable[[], bool]) -> None:
    """Compares the kernels of every class of calls that some runs meet, but for those that other processes
    are still compiling, until these are done.
    """
    unmeasured: Unmeasured = {}
    with contextlib.closing(runs):
        while is_compiling():
            known = len(unmeasured)
            with collecting(unmeasured):
                if next(runs, _END) is _END:
                    return
            for measurements, shape in list(unmeasured)[known:]:
                if not is_compiling():
                    return
                measurements.compare_unawaited(shape)
