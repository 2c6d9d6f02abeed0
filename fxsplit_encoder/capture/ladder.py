"""A ladder of budgets: which sizes of one forward are captured, how, and why others are not."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.capture.forward import CapturedForward, measure_ms
from fxsplit_encoder.compile import DIRECT
from fxsplit_encoder.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fxsplit_encoder.capture.buffers import StaticInputs, StaticParameters
    from fxsplit_encoder.capture.pool import GraphPool
    from fxsplit_encoder.compile import Runner

logger = logging.getLogger(__name__)

# `auto` prefers the exact shape when it costs at most this much more than a replay of the same size: the
# replay of a budget costs the same for every smaller batch, the exact shape less.
_EXACT_TOLERANCE = 1.02


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One size of a forward, ready to be captured."""

    inputs: StaticInputs
    parameters: StaticParameters
    segment_inputs: Sequence[str]
    rows: int
    num_rows: Tensor | None
    """Where the forward's masks read the number of real rows."""
    forward: Callable[[Runner], Sequence[Any]]
    """Runs over the tensors of `inputs`."""
    can_break: bool
    """Whether the forward has splitting ops, so that `piecewise` differs from `full`."""
    one_segment: Callable[[], CaptureRequest] | None = None
    """Makes the same request for batches of one segment. Empty segments cost attention: without them a full
    graph of 1024 patches took 3.5 instead of 4.0 ms (27 layers, one H200).
    """


class BudgetLadder:
    """The captures of one forward.

    Args:
        request: makes the capture request of a budget; its tensors become the capture's own.
        mode: "auto", "full" or "piecewise".
    """

    def __init__(self, request: Callable[[int], CaptureRequest], mode: str, pool: GraphPool) -> None:
        self.pool = pool
        self.mode = mode
        self.captured: dict[int, CapturedForward] = {}
        self.captured_one_segment: dict[int, CapturedForward] = {}
        """Full graphs for batches of one segment, beside those in `captured`."""
        self.exact: set[int] = set()
        """Budgets at whose size `auto` found the exact shape to be as fast."""
        self.dropped: dict[int, str] = {}
        """Budgets that could not be captured, and why."""
        self._request = request

    def capture(self, budget: int) -> CapturedForward | None:
        """Captures a budget unless that was done or failed before; None if it is dropped (capture rule 9)."""
        if budget not in self.captured and budget not in self.dropped and budget not in self.exact:
            try:
                self._capture(budget)
            except (CaptureError, torch.OutOfMemoryError) as error:  # the second: for the static inputs
                self.dropped[budget] = str(error)
                logger.warning("budget %d is dropped: %s", budget, error)
        return self.captured.get(budget)

    def best(self, budget: int, num_segments: int | None) -> CapturedForward:
        """The capture of a captured budget for a batch of so many segments (None: unknown)."""
        narrow = self.captured_one_segment.get(budget) if num_segments == 1 else None
        return narrow if narrow is not None else self.captured[budget]

    def num_bytes(self, budget: int) -> int:
        """Device memory that the captures of a budget added."""
        every = (self.captured.get(budget), self.captured_one_segment.get(budget))
        return sum(captured.num_bytes for captured in every if captured is not None)

    def clear(self) -> None:
        """Releases every capture; the ladder may be captured again."""
        for captured in (*self.captured.values(), *self.captured_one_segment.values()):
            captured.release()
        self.captured.clear()
        self.captured_one_segment.clear()
        self.exact.clear()
        self.dropped.clear()

    def _capture(self, budget: int) -> None:
        request = self._request(budget)
        if self.mode != "auto" or not self.pool.is_cuda:
            self.captured[budget] = self._record(request, "full" if self.mode == "auto" else self.mode)
            cost = None
        else:
            cost = self._capture_cheapest_mode(budget, request)
        if request.one_segment is not None and budget in self.captured and self.pool.is_cuda:
            self._capture_one_segment(budget, request.one_segment(), cost)

    def _capture_cheapest_mode(self, budget: int, request: CaptureRequest) -> float:
        """Captures in every mode, measures, and keeps the cheapest; returns its milliseconds."""
        candidates = self._record_all(request, ["full", "piecewise"] if request.can_break else ["full"])
        costs = {mode: captured.measure() for mode, captured in candidates.items()}
        best = min(costs, key=costs.__getitem__)
        exact = measure_ms(lambda: request.forward(DIRECT), self.pool.device)
        logger.info("budget %d: replay ms %s, exact shape %.3f ms", budget, costs, exact)
        exact_wins = exact <= costs[best] * _EXACT_TOLERANCE
        for mode, captured in candidates.items():
            if mode != best or exact_wins:
                captured.release()
        if exact_wins:
            self.exact.add(budget)
        else:
            self.captured[budget] = candidates[best]
        return costs[best]

    def _capture_one_segment(self, budget: int, request: CaptureRequest, cost: float | None) -> None:
        """Adds a full graph for one segment: beside a full one, or a piecewise one that costs more."""
        if self.captured[budget].mode == "piecewise" and cost is None:
            return  # the user wants piecewise, which attends to the true segments anyway
        try:
            narrow = self._record(request, "full")
        except CaptureError as error:
            logger.warning(
                "budget %d: batches of one segment share the capture of all others: %s", budget, error
            )
            return
        if self.captured[budget].mode == "full" or (cost is not None and narrow.measure() < cost):
            self.captured_one_segment[budget] = narrow
        else:
            narrow.release()

    def _record_all(self, request: CaptureRequest, modes: Sequence[str]) -> dict[str, CapturedForward]:
        """Captures in each mode; fails only if all fail."""
        recorded: dict[str, CapturedForward] = {}
        failures: list[CaptureError] = []
        for mode in modes:
            try:
                recorded[mode] = self._record(request, mode)
            except CaptureError as error:
                failures.append(error)
        if not recorded:
            raise failures[0]
        return recorded

    def _record(self, request: CaptureRequest, mode: str) -> CapturedForward:
        captured = CapturedForward(
            request.inputs,
            request.parameters,
            request.segment_inputs,
            request.rows,
            request.num_rows,
            mode,
            self.pool,
        )
        captured.record(request.forward)
        return captured
