"""Captures at the token counts that occur, without padding: when they are made, tried and kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from fxsplit_encoder.caching import Recent
from fxsplit_encoder.capture import BudgetLadder, CaptureRequest, SharedBuffers, UnpaddedCaptures
from fxsplit_encoder.capture.forward import measure_ms
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.planning.costs import CostCurve, PathCosts
from fxsplit_encoder.planning.plan import PathPlan
from fxsplit_encoder.runtime.requests import CaptureScope

logger = logging.getLogger(__name__)

# Inputs of larger captures than any before get as many rows again to spare: sizes come in no order.
_GROWTH = 2

_KEPT_WEIGHTS = 1024

# What runs at the exact shape lose to a replay only a trial tells. A size is tried once a capture costs this
# share of what its runs took. A choice.
_TRIAL_SHARE = 0.1

_NEVER_REPLAYED = frozenset({MissReason.DISABLED, MissReason.UNSUPPORTED_INPUT})


class UnpaddedReplays:
    """Captures token counts that recur at their exact size.

    By hits, with `mode: exact` and where padding is not proved, a token count is captured when it has come
    `exact_min_hits` times. By cost, with `mode: auto` on a device, it is captured once what its batches lost
    to padding and launches adds up to the cost of a capture, so that at worst about twice the least is paid;
    one that runs at its exact shape also once a capture costs a tenth of its runs. It is kept if a replay is
    faster than the run, measured once with the batch in hand.

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
        self.exact_ms: dict[int, float] = {}
        """Of sizes whose captures were given up: what the batch that was tried took at its exact shape."""
        self._remaining_bytes = scope.remaining_bytes
        self._costs = PathCosts()
        self._replay_curve = CostCurve(())
        self._capture_ms = 0.0
        self._weights: Recent[PathPlan, float] = Recent(_KEPT_WEIGHTS)
        """By plan, of which a service sees few."""

    def use_costs(self, costs: PathCosts, capture_ms: float) -> None:
        """Sets the costs of replays, of other runs and of a capture, for `by_cost`."""
        self._costs = costs
        self._replay_curve = CostCurve(tuple(sorted(costs.replay.items())))
        self._capture_ms = capture_ms
        self._weights.clear()

    def find(self, planned: PathPlan, *, by_cost: bool, now: bool = False) -> BudgetLadder | None:
        """Returns the ladder with a capture of the batch's tokens, made if it is due or `now`; or None."""
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
        ladder = self.captures.find(tokens, weight, on_trial=by_cost)
        if ladder is None and not self.captures:
            self.inputs.clear()  # of captures that were not made, or are no more
        return ladder

    def keeps(self, tokens: int, replay: Callable[[], Any], exact: Callable[[], Any]) -> bool:
        """Returns whether the capture of a size serves; one on trial is first timed against the exact shape.

        Args:
            tokens: a size that is captured.
            replay, exact: the batch in hand, by either.
        """
        if tokens not in self.captures.on_trial:
            return True
        replay_ms = measure_ms(replay, self.captures.device)
        try:
            exact_ms = measure_ms(exact, self.captures.device)
        except (InputError, torch.OutOfMemoryError):  # the batch is served by the replay alone
            exact_ms = math.inf
        logger.info("%d tokens: replay %.3f ms, exact shape %.3f", tokens, replay_ms, exact_ms)
        gains = replay_ms < exact_ms
        self.captures.conclude(tokens, gains=gains)
        if not gains:
            self.exact_ms[tokens] = exact_ms
        return gains

    def reason(self, planned: PathPlan) -> MissReason | None:
        """Returns why a batch that was not replayed counts as a miss; None: for the planned reason."""
        return None if planned.reason in _NEVER_REPLAYED else self.captures.reason(planned.tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of the captures and their inputs."""
        return self.captures.num_bytes + self.inputs.num_bytes

    def clear(self) -> None:
        """Releases every capture and forgets what was counted."""
        self.captures.clear()
        self.inputs.clear()
        self.exact_ms.clear()

    def _kept_weight(self, planned: PathPlan) -> float:
        try:
            return self._weights[planned]  # `get` would be a call in Python
        except KeyError:
            weight = self._weights[planned] = self._weight(planned)
            return weight

    def _weight(self, planned: PathPlan) -> float:
        """What a batch loses, or may lose, to a replay of its size, as a share of the cost of a capture."""
        costs, tokens = self._costs, planned.tokens
        if not self._capture_ms or not self._replay_curve.points:
            return 0.0
        if planned.budget is not None:
            spent = costs.replay[planned.budget]
        else:
            spent = min(costs.exact_curve.at(tokens), costs.eager_curve.at(tokens))
        lost = max(0.0, spent - self._replay_curve.at(tokens))
        if planned.budget is None and math.isfinite(spent):
            lost = max(lost, spent * _TRIAL_SHARE)
        return lost / self._capture_ms

    def _allowance(self) -> int | None:
        remaining = self._remaining_bytes()
        return None if remaining is None else remaining + self.captures.num_bytes
