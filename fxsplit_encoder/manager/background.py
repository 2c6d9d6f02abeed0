"""Background capture, for `capture(wait=False)`: compiles, measures and captures between requests."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from fxsplit_encoder._torch.device import on_device
from fxsplit_encoder._torch.modes import without_autograd
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import FxSplitError, InputError, StartFileError
from fxsplit_encoder.kernels.meter import timing_without_graphs
from fxsplit_encoder.manager.compile_process import START, CompileWorker, check_elsewhere
from fxsplit_encoder.manager.generation import CapturePlan, Generation
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.start import load_start
from fxsplit_encoder.manager.turns import Turns, WorkBetween, compare_ahead
from fxsplit_encoder.pauses import StoppedError, has_turn, pausing_by, recording
from fxsplit_encoder.runtime.captured_program import Choosers
from fxsplit_encoder.runtime.statistics import CaptureProgress, Phase

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 10.0
"""Timeout of the join at the interpreter's exit."""

_POLL_SECONDS = 0.005
"""Poll interval of `wait`, in seconds."""


def check_that_steps_will_do(config: EncoderConfig) -> None:
    """Raises InputError where captures cannot be made between requests."""
    if config.data_parallel:
        raise InputError(
            "wait: expected True with data_parallel, whose ranks share their costs in the order of their "
            "calls; got False. Call capture() on every rank, or capture from a start_file"
        )
    if config.invariant:
        raise InputError(
            "wait: expected True with invariant, since the first captures, of the tower's own forward, "
            "have other bits than the next; got False. Call capture(), with a start_file to be sooner"
        )


class BackgroundCapture:
    """Compiles, measures and captures one generation while another serves, on a thread of its own.

    Work on the device or the tower holds the manager's lock, released at each pause; tracing and compiling
    happen in another process, or on this thread without the lock.

    Args:
        target, planned: the generation to capture, and its captures.
        first: the generation that serves until then.
        switch: makes the target serve; called with the lock.
    """

    def __init__(
        self,
        target: Generation,
        planned: CapturePlan,
        first: Generation,
        turns: Turns,
        kernels: Choosers,
        switch: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self.notes: list[str] = []
        """Lines for `reports`."""
        self._target = target
        self._planned = planned
        self._first: Generation | None = first
        self._turns = turns
        self._kernels = kernels
        self._switch = switch
        self._begin = time.perf_counter()
        self._progress = CaptureProgress("tracing")
        self._stopped = threading.Event()
        self._over = threading.Event()
        self.work = WorkBetween(
            turns, self._stopped.is_set, self._in_order, is_handed_over=target.pool.is_cuda
        )
        self._worker: CompileWorker | None = None
        self._thread: threading.Thread | None = None

    # --- from other threads

    @property
    def progress(self) -> CaptureProgress:
        """The phase, its counts, and the seconds so far."""
        progress = self._progress
        return progress if progress.is_over else replace(progress, seconds=time.perf_counter() - self._begin)

    def start(self) -> None:
        """Starts the thread."""
        atexit.register(self.end)  # a thread that captures must not outlive what it calls
        self._thread = threading.Thread(target=self.run, name="fxsplit-capture", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, letting captures be made; returns whether all is done."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._over.is_set():
            left = _POLL_SECONDS if end is None else min(_POLL_SECONDS, end - time.monotonic())
            if left <= 0:
                break
            self._turns.assist()
            self._over.wait(left)
        return self._over.is_set()

    def stop(self) -> None:
        """Cancels further steps and ends the other process; a step that runs goes on."""
        self._stopped.set()
        if not self._progress.is_over:
            self._finish("stopped")
        self._over.set()
        if (worker := self._worker) is not None:
            worker.close()

    def end(self) -> None:
        """Stops and joins the thread, at the interpreter's exit."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)

    # --- the thread

    def run(self) -> None:
        """Does all of the work on this thread."""
        try:
            with self._kernels.choosing(), timing_without_graphs(), pausing_by(self.work):
                with on_device(self._target.pool.device), without_autograd():
                    self._compile_and_capture()
        except StoppedError:
            pass
        finally:
            self._target.captures.spare = None
            self._over.set()
            atexit.unregister(self.end)

    def _compile_and_capture(self) -> None:
        try:
            self._compile()
            if self._target.scope.measured:
                self._tell("measuring")
                compare_ahead(lambda: self._target.run(self._planned), self._target.pool.device)
            self._target.captures.spare = self._give_way
            if self._target.is_measured:
                self._tell("measuring")
            with has_turn():
                wanted = self._target.prepare(self._planned)
                self._tell("capturing", 0, len(wanted))
                self._target.captures.capture(wanted, functools.partial(self._tell, "capturing"))
            with recording():
                self._serve_target()
                self._finish("done")
        except Exception as error:  # whatever compiling raises: requests go on being served
            logger.exception("captures behind capture(wait=False) are given up")
            reason = str(error) if isinstance(error, FxSplitError) else f"{type(error).__name__}: {error}"
            with recording():
                if self._first is not None:  # else it serves already
                    self._target.clear()
                self.notes.append(f"captures of the uncompiled tower go on serving: {reason}")
                self._finish("failed", reason)

    def _give_way(self) -> None:
        """Makes the target serve what it has, and releases the first captures for their memory."""
        self.notes.append("too little memory for both: the first captures were released before the last came")
        self._serve_target()

    def _serve_target(self) -> None:
        if (switch := self._switch()) is None:
            raise StoppedError
        switch()
        self._first = None

    def _in_order(self) -> AbstractContextManager[object]:
        """Orders the work on the device, too, between the requests before and after it."""
        return self._first.pool.replaying() if self._first else contextlib.nullcontext()

    def _tell(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        if not self._stopped.is_set():
            self._progress = CaptureProgress(phase, done, total)

    def _finish(self, phase: Phase, reason: str = "") -> None:
        seconds = time.perf_counter() - self._begin
        self._progress = replace(self._progress, phase=phase, seconds=seconds, reason=reason)
        logger.info("captures behind capture(wait=False): %s", self._progress)

    # --- compiling

    def _compile(self) -> None:
        paths = self._target.compiled_paths
        for path in paths:
            path.restore()
        if pending := [path for path in paths if not path.is_settled]:
            try:
                self._compile_elsewhere(pending)
            except InputError as error:
                self.notes += [
                    f"{path.label}: compiled on a thread beside the requests: {error}" for path in pending
                ]
        self._target.compile(self._tell_compiled)

    def _compile_elsewhere(self, paths: list[EncoderPath]) -> None:
        """Compiles in another process, for paths to restore; InputError: it cannot make the tower."""
        check_elsewhere(self._target)
        with has_turn():
            worker = self._worker = CompileWorker(self._target)
        try:
            answer, not_built = worker.wait(self._tell_compiled, self._stopped.is_set)
            try:
                load_start(self._target, self._kernels.measurements, worker.path / START, is_measured=False)
            except StartFileError as error:
                self.notes.append(f"what another process compiled is not used: {error}")
        finally:
            self._worker = None
            worker.close()
        if not_built:
            self.notes.append(f"kernels are built beside the requests: {not_built}")
        for path in paths:
            if (refusal := answer["refused"].get(path.label)) is not None:
                path.refuse(refusal)
            elif (why := answer["unsaved"].get(path.label)) is not None:
                self.notes.append(f"{path.label}: compiled again in this process: {why}")

    def _tell_compiled(self, done: int, total: int) -> None:
        from fxsplit_encoder.compile.options import TRACING_PHASES

        pieces, all_pieces = done - TRACING_PHASES, total - TRACING_PHASES
        self._tell(*(("compiling", pieces, all_pieces) if pieces >= 0 and total else ("tracing", 0, 0)))
