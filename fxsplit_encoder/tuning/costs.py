"""Costs of batches by which ladders of budgets are compared."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fxsplit_encoder.planning.costs import (
    EXACT_LAUNCH_TOKENS,
    EXACT_TOLERANCE,
    REPLAY_LAUNCH_TOKENS,
    CostCurve,
    PathCosts,
)


def rising(costs: Mapping[int, float]) -> CostCurve:
    """The curve through costs by positive numbers of output tokens that never falls: a point below an earlier
    one is noise, and raised to it.
    """
    tokens = sorted(costs)
    highest = itertools.accumulate((costs[count] for count in tokens), max)
    return CostCurve(tuple(zip(tokens, highest, strict=True)))


def linear(fixed: float) -> CostCurve:
    """A fixed cost and one for every token."""
    return CostCurve(((1, fixed + 1), (2, fixed + 2)))


@dataclass(frozen=True)
class BatchCosts:
    """Costs of a batch served by a budget, and at its exact shape.

    By default in units of one output token: a replay costs its budget and 64 tokens, the exact shape its own
    tokens and 256.
    """

    replay: CostCurve = field(default_factory=lambda: linear(REPLAY_LAUNCH_TOKENS))
    """By the budget that is replayed."""
    exact: CostCurve = field(default_factory=lambda: linear(EXACT_LAUNCH_TOKENS))
    """By the batch's own tokens."""
    unit: str = "tokens"
    not_kept_from: int | None = None
    """The budget from which on `mode: auto` kept none when it measured; None: it kept all."""

    def keeps(self, budgets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which budgets `mode: auto` will keep: by the costs, and by what it kept when it measured them."""
        kept: NDArray[np.bool_] = self.exact(budgets) > EXACT_TOLERANCE * self.replay(budgets)
        return kept if self.not_kept_from is None else kept & (budgets < self.not_kept_from)

    def of_ladder(self, budgets: Sequence[int]) -> PathCosts:
        """The costs that the manager would find for a path with these budgets."""
        return PathCosts({b: self.replay.at(b) for b in budgets}, exact=self.exact.points)
