"""Replays without padding: which token counts deserve a capture of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

from fxsplit_encoder.capture import BudgetLadder, CaptureRequest, SharedBuffers, UnpaddedCaptures
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.planning.costs import CostCurve, PathCosts
from fxsplit_encoder.planning.plan import PathPlan
from fxsplit_encoder.runtime.scope import CaptureScope

# Inputs of larger captures than any before get as many rows again to spare: sizes come in no order.
_GROWTH = 2

_KEPT_WEIGHTS = 1024

_NEVER_REPLAYED = frozenset({MissReason.DISABLED, MissReason.UNSUPPORTED_INPUT})


class UnpaddedReplays:
    """Captures at the token counts that occur.

    By hits, a token count is captured when it has come `exact_min_hits` times: with `mode: exact`, and where
    padding is not proved. By cost, with `mode: auto` on a device, once what its batches have cost more than
    unpadded replays would, for padding and for launches, adds up to what a capture costs: so the worst that
    can happen is to pay about twice the least.

    Args:
        request: makes the capture request of a size over shared inputs.
        attention_ms: as for `UnpaddedCaptures`.
    """

    def __init__(
        self,
        request: Callable[[int, SharedBuffers], CaptureRequest],
        scope: CaptureScope,
        *,
        attention_ms: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        self.inputs = SharedBuffers(_GROWTH)
        self.captures = UnpaddedCaptures(
            lambda tokens: request(tokens, self.inputs),
            scope.pool,
            threshold=float(scope.config.exact_min_hits),
            max_captures=scope.config.exact_max_graphs,
            max_bytes=self._allowance,
            agree=scope.agree,
            attention_ms=attention_ms,
        )
        self._remaining_bytes = scope.remaining_bytes
        self._costs = PathCosts()
        self._replay_curve = CostCurve(())
        self._capture_ms = 0.0
        self._weights: dict[PathPlan, float] = {}
        """By plan, of which a service sees few."""

    def use_costs(self, costs: PathCosts, capture_ms: float) -> None:
        """What replays, other runs, and a capture of the path cost; for `by_cost`."""
        self._costs = costs
        self._replay_curve = CostCurve(tuple(sorted(costs.replay.items())))
        self._capture_ms = capture_ms
        self._weights.clear()

    def find(self, planned: PathPlan, *, by_cost: bool, now: bool = False) -> BudgetLadder | None:
        """What holds a capture of the batch's token count, made if it is time or `now`; None: nothing."""
        if planned.tokens == 0 or planned.reason in _NEVER_REPLAYED:
            return None
        tokens = planned.tokens
        weight = 1.0
        if now:
            weight = math.inf
        elif by_cost and tokens not in self.captures:
            weight = self._kept_weight(planned) * self.captures.threshold
            if not weight:
                return None
        ladder = self.captures.find(tokens, weight)
        if ladder is None and not self.captures:
            self.inputs.clear()  # of captures that were not made, or are no more
        return ladder

    def reason(self, planned: PathPlan) -> MissReason | None:
        """Why a batch that was not replayed counts as a miss; None: for the reason that was planned."""
        return None if planned.reason in _NEVER_REPLAYED else self.captures.reason(planned.tokens)

    @property
    def num_bytes(self) -> int:
        """Device memory of the captures and their inputs."""
        return self.captures.num_bytes + self.inputs.num_bytes

    def clear(self) -> None:
        """Releases every capture and forgets what was counted."""
        self.captures.clear()
        self.inputs.clear()

    def _kept_weight(self, planned: PathPlan) -> float:
        weight = self._weights.get(planned)
        if weight is None:
            if len(self._weights) >= _KEPT_WEIGHTS:
                self._weights.clear()
            weight = self._weights[planned] = self._weight(planned)
        return weight

    def _weight(self, planned: PathPlan) -> float:
        """What a batch costs more than at its exact shape, as a share of what a capture costs."""
        costs, tokens = self._costs, planned.tokens
        if not self._capture_ms or not self._replay_curve.points:
            return 0.0
        if planned.budget is not None:
            spent = costs.replay[planned.budget]
        else:
            spent = min(costs.exact_curve.at(tokens), costs.eager_curve.at(tokens))
        return max(0.0, spent - self._replay_curve.at(tokens)) / self._capture_ms

    def _allowance(self) -> int | None:
        remaining = self._remaining_bytes()
        return None if remaining is None else remaining + self.captures.num_bytes
