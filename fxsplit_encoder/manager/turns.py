"""A lock that gives requests priority over background work, and the comparison of kernels in such work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fxsplit_encoder.kernels.choice import Unmeasured, collecting
from fxsplit_encoder.pauses import Scheduler, StoppedError, has_turn

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
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self.num_waiting = 0
        self._due: int | None = None
        """The thread whose step comes before later requests."""
        self.is_wanted = False
        """Whether a thread waits in `handed_over`."""
        self._is_handed_over = False

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
            if self.is_wanted and kind is None and self._depth == 1:
                self._hand_over()
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

    @contextmanager
    def handed_over(self, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Holds the lock of a thread that has just served a request or calls `assist`, and waits inside. One
        thread may enter it at a time. StoppedError: canceled.
        """
        with self._changed:
            self.is_wanted = True
            while self.is_wanted:
                if is_stopped():
                    self.is_wanted = False
                    raise StoppedError
                self._changed.wait(_POLL_SECONDS)
        lender, self.owner = self.owner, threading.get_ident()
        try:
            if is_stopped():
                raise StoppedError
            yield
        finally:
            self.owner = lender
            with self._changed:
                self._is_handed_over = False
                self._changed.notify_all()

    def assist(self) -> None:
        """Hands the lock over to the thread that waits for it in `handed_over`, if any."""
        if self.is_wanted:
            with self:
                pass

    def _hand_over(self) -> None:
        with self._changed:
            if not self.is_wanted:
                return
            self.is_wanted, self._is_handed_over = False, True
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._is_handed_over)
            finally:  # after an interrupt, too
                self._changed.wait_for(lambda: not self._is_handed_over)

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
        is_handed_over: whether CUDA graphs are recorded in `Turns.handed_over`: at any other time a thread
            that serves requests may synchronize the device, which no thread may while another records.
    """

    def __init__(
        self,
        turns: Turns,
        is_stopped: Callable[[], bool],
        with_turn: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        *,
        at_once: bool = False,
        is_handed_over: bool = False,
    ) -> None:
        self._turns = turns
        self._is_stopped = is_stopped
        self._with_turn = with_turn
        self._at_once = at_once
        self.is_handed_over = is_handed_over
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

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Holds the lock, with `is_handed_over` that of a thread that waits; StoppedError: canceled."""
        if not self.is_handed_over:
            with self.turn():
                yield
            return
        had_turn = self._has_turn
        self._give()
        self._take(self._turns.handed_over(self._is_stopped))
        try:
            yield
        finally:
            self._give()
            if had_turn:
                self._take()

    def _take(self, lock: AbstractContextManager[None] | None = None) -> None:
        begin = time.perf_counter()
        with contextlib.ExitStack() as taken:
            taken.enter_context(lock or self._turns.step(self._is_stopped, at_once=self._at_once))
            taken.enter_context(self._with_turn())
            self._held = taken.pop_all()
        self._has_turn = True
        self.seconds_paused += time.perf_counter() - begin

    def _give(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._held.close()


def compare_ahead(run: Callable[[], None], device: torch.device) -> None:
    """Compares the kernels of all calls of a run, at first those that wait for no other process. Checking
    results, which may compile, takes no lock.
    """
    unmeasured: Unmeasured = {}
    with has_turn(), collecting(unmeasured):
        run()
    # Of its own, so that requests do not queue behind it.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        if any(kernel.is_awaited for measurements, _ in unmeasured for kernel in measurements.kernels):
            for measurements, shape in unmeasured:
                measurements.compare_unawaited(shape)
        for measurements, shape in unmeasured:
            measurements.compare(shape)
    if stream is not None:
        # While a capture is open torch frees none of the blocks that it keeps for later.
        torch.cuda.empty_cache()
