"""A ladder of budgets: which sizes of one forward are captured, how, and why others are not."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fxsplit_encoder.capture.forward import (
    WARMUPS,
    CapturedForward,
    CaptureRequest,
    MeasuredRun,
    ProgramBody,
    measure_run,
)
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import CaptureError, CaptureMemoryError
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.pauses import pause, scheduler
from fxsplit_encoder.planning.costs import EXACT_TOLERANCE

logger = logging.getLogger(__name__)

# Where the host needs less than this share of the time that an exact run keeps the device busy, the device
# never waits for it, and a replay has little to gain: such a budget is not captured to be measured, which
# would take longest where the budget is large. The share is a choice, not a measurement.
_HIDDEN_HOST = 0.5

# Where it needs more than this share, the host hardly keeps ahead of the device: the run takes that long only
# while nothing else wants the processor, which it keeps busy all the time. Such a run counts for more than it
# took. Both figures are choices.
_BUSY_HOST = 0.75
_BUSY_HOST_PRICE = 1.05


@dataclass(slots=True)
class MeasuredCosts:
    """Milliseconds of one budget, full to its last row by one segment."""

    modes: dict[str, float]
    """Of a replay in each captured mode; empty where the exact run alone decided."""
    exact: float
    """Of the forward at its exact shape."""
    host: float = 0.0
    """Of the host, to launch it."""
    attention: float = 0.0
    """Of `exact`, the attention over the one segment, which a batch of many short ones does without."""
    single_segment: float | None = None
    """Of a replay of the capture for one segment, if any."""
    mode: str | None = None
    """Of the capture that is kept; None: it needs no graph."""

    @property
    def hides_host(self) -> bool:
        """Whether the device works so long that it never waits for the host."""
        return self.host < _HIDDEN_HOST * (self.exact - self.attention)

    @property
    def exact_price(self) -> float:
        """The price of an exact run against a replay: 5 % more outside attention, if the host is as busy."""
        beside = max(0.0, self.exact - self.attention)  # two measurements: the first may be the smaller one
        busy = self.host > _BUSY_HOST * beside
        return self.exact + beside * (_BUSY_HOST_PRICE - 1) if busy else self.exact

    @property
    def best(self) -> float:
        """Milliseconds of a replay in the mode that was kept."""
        return min(self.modes.values())


# A second graph for batches of one segment is kept where it costs at most this share of the other: less is
# within the noise of a measurement, and takes memory all the same.
_SINGLE_SEGMENT_GAIN = 0.98


class BudgetLadder:
    """The captures of one forward.

    Args:
        request: makes the capture request of a budget; its tensors become the capture's own.
        mode: "auto", "full", "piecewise" or "breakable".
        measured: whether every way of running is timed, to choose by it; only on a device.
        attention_ms: milliseconds of attention over one segment as long as a budget.
        agree: whether every rank says yes, so that all capture the same.
        compares_kernels: whether attention kernels are compared before a capture.
    """

    def __init__(
        self,
        request: Callable[[int], CaptureRequest],
        mode: str,
        pool: GraphPool,
        *,
        measured: bool = True,
        attention_ms: Callable[[int], float] = lambda budget: 0.0,
        agree: Callable[[bool], bool] = bool,
        compares_kernels: bool = True,
    ) -> None:
        self.pool = pool
        self.mode = mode
        self.measured = measured
        self.captured: dict[int, CapturedForward] = {}
        self.dropped: dict[int, str] = {}
        """Reasons of budgets that could not be captured."""
        self.out_of_memory: set[int] = set()
        """Those of them for which the device had no memory."""
        self.replaced: dict[int, str] = {}
        """Reasons of budgets that were captured in another mode than the wanted one."""
        self.costs: dict[int, MeasuredCosts] = {}
        """Measured on a device, of budgets in `captured` and `no_graph_needed`."""
        self.exact_may_win = True
        """Whether `auto` captures no budget whose run at the exact shape takes as long."""
        self.in_inference_mode = False
        """Whether a tower's own code is timed in inference mode, in which it will run."""
        self._capture_ms: list[float] = []
        self._is_warm = False  # whether the forward has run: another size needs one warm-up only
        self._bound_by_host: tuple[int, MeasuredRun] | None = None
        """The largest budget at which the host bounds a tower's own code, and its run."""
        self._known: dict[int, MeasuredCosts] = {}
        self.request = request
        self.attention_ms = attention_ms
        self._agree = agree
        self._compared: list[float] = []
        """Seconds of each comparison of kernels."""
        self._comparing = partial(measuring, self._compared) if compares_kernels else contextlib.nullcontext
        self._num_bytes: Counter[int] = Counter()

    def capture(self, budget: int) -> CapturedForward | None:
        """Captures a budget once, with pauses; None if it is dropped (capture rule 9)."""
        if budget in self.captured or budget in self.dropped or budget in self.no_graph_needed:
            return self.captured.get(budget)
        known = self._known.get(budget) if self._is_timed else None
        start = self._own_seconds()
        try:
            with self._comparing():
                if known is not None and known.mode is None:
                    self.costs[budget] = replace(known)
                else:
                    request = self._agreed_request(budget)
                    if not self._is_timed:
                        (self.captured[budget],) = self._record(budget, request).values()
                    elif known is None or not self._capture_as_known(budget, request, known):
                        self._capture_cheapest_mode(budget, request)
        except (CaptureError, torch.OutOfMemoryError) as error:  # the second: for the static inputs
            self.dropped[budget] = str(error)
            if isinstance(error, (CaptureMemoryError, torch.OutOfMemoryError)):
                self.out_of_memory.add(budget)
            logger.warning("budget %s is dropped: %s", budget, error)
        else:
            if budget not in self._known:
                self._capture_ms.append((self._own_seconds() - start) * 1e3)
        return self.captured.get(budget)

    @property
    def _is_timed(self) -> bool:
        return self.measured and self.pool.is_cuda

    def _own_seconds(self) -> float:
        """A clock without comparisons of kernels and pauses for requests."""
        return time.perf_counter() - sum(self._compared) - scheduler().seconds_paused

    def run(self, budget: int) -> None:
        """Runs once each body that `capture` times or records for a budget without measurements, so that its
        kernels are known.
        """
        if not self._is_timed or budget in self._known:
            return
        try:
            request = self.request(budget)
            bodies: list[Callable[[], Any]] = [request.body, request.exact_body()]
            if request.single_segment is not None:
                bodies.append(request.single_segment().body)
            for body in bodies:
                pause()
                with torch.inference_mode(False), torch.no_grad():
                    body()
        except (CaptureError, torch.OutOfMemoryError) as error:  # `capture` will say it
            logger.info("budget %s cannot be run ahead: %s", budget, error)

    def expect(self, known: Mapping[int, MeasuredCosts], capture_ms: float) -> None:
        """Takes measurements of another ladder on such a device: its budgets are captured without timing."""
        self._known = dict(known)
        self._capture_ms = [capture_ms] if known else []

    def known(self) -> dict[int, MeasuredCosts]:
        """Returns the measured budgets, for another ladder to `expect`."""
        kept = self.captured.keys() | self.no_graph_needed
        return {budget: self.costs[budget] for budget in kept & self.costs.keys()}

    @property
    def no_graph_needed(self) -> set[int]:
        """Budgets at whose size `auto` found the exact shape to be as fast."""
        return {budget for budget, costs in self.costs.items() if costs.mode is None}

    @property
    def capture_ms(self) -> float:
        """Median milliseconds of capturing and timing a budget, without comparing kernels."""
        return statistics.median(self._capture_ms) if self._capture_ms else 0.0

    def num_bytes(self, budget: int) -> int:
        """Device memory that capturing a budget added, in all modes that were tried."""
        return self._num_bytes[budget]

    def drop(self, budget: int, reason: str) -> None:
        """Releases the captures of one budget, which is not captured again before `clear`."""
        if budget in self.captured:
            self.captured.pop(budget).release()
        self.dropped[budget] = reason

    def forget_drop(self, budget: int) -> None:
        """Has the next `capture` of a dropped budget try again."""
        self.dropped.pop(budget, None)
        self.out_of_memory.discard(budget)

    def release(self) -> None:
        """Releases every capture, to be made again; what was measured of other budgets stays."""
        for budget, captured in self.captured.items():
            captured.release()
            self.costs.pop(budget, None)
        self.captured.clear()
        self.replaced.clear()
        self._num_bytes.clear()

    def clear(self) -> None:
        """Releases every capture and forgets what was measured."""
        self.release()
        self.dropped.clear()
        self.out_of_memory.clear()
        self.costs.clear()
        self._bound_by_host = None

    def _capture_as_known(self, budget: int, request: CaptureRequest, known: MeasuredCosts) -> bool:
        assert known.mode is not None
        try:
            self.captured[budget] = self._record(budget, request, [known.mode])[known.mode]
        except CaptureError as error:
            logger.warning("budget %s is measured again: in mode %s %s", budget, known.mode, error)
            return False
        self.costs[budget] = replace(known)
        if known.single_segment is not None:
            self._capture_single_segment(budget, request)
        return True

    def _agreed_request(self, budget: int) -> CaptureRequest:
        """Makes the request, by a vote: inside the forward other ranks would wait for one that has none."""
        try:
            request = self.request(budget)
        except (CaptureError, torch.OutOfMemoryError):
            self._agree(False)
            raise
        if not self._agree(True):
            raise CaptureError("another rank has no inputs of this size")
        return request

    def _capture_cheapest_mode(self, budget: int, request: CaptureRequest) -> None:
        exact = self._exact_run(budget, request)
        pause()
        costs = MeasuredCosts({}, *exact, self.attention_ms(budget))
        exact_may_win = self.mode == "auto" and self.exact_may_win
        if exact_may_win and costs.hides_host:
            logger.info("budget %s: exact shape %.3f ms, of the host %.3f", budget, *exact)
            self.costs[budget] = costs
            return
        candidates = self._record(budget, request)
        for mode, captured in candidates.items():
            pause()
            costs.modes[mode] = captured.measure()
        logger.info(
            "budget %s: replay ms %s, exact shape %.3f ms, of the host %.3f", budget, costs.modes, *exact
        )
        exact_wins = exact_may_win and costs.exact_price <= costs.best * EXACT_TOLERANCE
        best = min(costs.modes, key=costs.modes.__getitem__)
        for mode, captured in candidates.items():
            if mode != best or exact_wins:
                captured.release()
        if not exact_wins:
            self.captured[budget], costs.mode = candidates[best], best
        self.costs[budget] = costs
        # A user who wants piecewise has a capture that attends to the true segments anyway.
        if costs.mode and request.single_segment is not None and (best == "full" or self.mode == "auto"):
            self._capture_single_segment(budget, request)

    def _exact_run(self, budget: int, request: CaptureRequest) -> MeasuredRun:
        """The time of a run at the exact shape: measured, or that of a larger one that the host bounds."""
        is_own_code = not isinstance(request.body, ProgramBody)
        if is_own_code:
            self._is_warm = True
            if self._bound_by_host is not None and budget < self._bound_by_host[0]:
                return self._bound_by_host[1]
        mode = torch.inference_mode if self.in_inference_mode and is_own_code else contextlib.nullcontext
        try:
            with mode():  # in which its inputs are made, too
                run = measure_run(request.exact_body(), self.pool.device)
        except torch.OutOfMemoryError:
            return MeasuredRun(math.inf, math.inf)
        if is_own_code and run.is_bound_by_host:  # a smaller size takes as long, and need not be run
            self._bound_by_host = budget, run
        return run

    def _capture_single_segment(self, budget: int, request: CaptureRequest) -> None:
        costs = self.costs[budget]
        pause()
        try:
            if request.single_segment is None:
                raise CaptureError("the forward tells no segments")
            single = self._record(budget, request.single_segment(), ["full"])["full"]
        except CaptureError as error:
            logger.warning(
                "budget %s: batches of one segment share the capture of all others: %s", budget, error
            )
            costs.single_segment = None
            return
        if costs.single_segment is None:  # not known
            pause()
            cost = single.measure()
            if cost >= costs.best * _SINGLE_SEGMENT_GAIN:
                single.release()
                return
            costs.single_segment = cost
        self.captured[budget].for_one_segment = single

    def _preferred(self, request: CaptureRequest) -> list[str]:
        """Returns the modes of a request, the wanted one first."""
        modes = request.modes
        # Without a program the mode that breaks at attention is `breakable`.
        wanted = self.mode if self.mode in modes else modes[0 if self.mode == "auto" else -1]
        return sorted(modes, key=wanted.__ne__)

    def _record(
        self, budget: int, request: CaptureRequest, modes: Sequence[str] | None = None
    ) -> dict[str, CapturedForward]:
        """Captures in each of some modes; without them in those that may be the cheapest by time, or only in
        the first that every rank can, which is the one that is set if possible. CaptureError if none does.
        """
        first = modes is None and not (self.mode == "auto" and self._is_timed)
        modes = modes or self._preferred(request)
        recorded: dict[str, CapturedForward] = {}
        failures: list[CaptureError] = []
        for mode in modes:
            if any(captured.is_unbroken for captured in recorded.values()):
                break  # the other mode would be the same graph
            if recorded or failures:
                pause()
            captured = CapturedForward(request, mode, self.pool)
            failure = None
            try:
                captured.record(warmups=1 if self._is_warm else WARMUPS)
            except CaptureError as error:
                failure = error
            if not self._agree(failure is None):
                if failure is None:
                    captured.release()
                failures.append(failure or CaptureError("another rank could not capture it"))
                continue
            self._is_warm = True
            self._num_bytes[budget] += captured.num_bytes
            recorded[mode] = captured
            if first:
                break
        if not recorded:
            raise failures[0]
        if first and failures:
            self.replaced[budget] = f"captured in mode {mode}: in mode {modes[0]} {failures[0]}"
        return recorded
