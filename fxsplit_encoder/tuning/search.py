"""The ladders of least cost, by dynamic programming over sorted demands, and the costs of batches."""

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

# Sums of the same costs in another order differ by rounding; that is no reason for another graph.
_ROUNDING = 1e-12

Ladder = tuple[int, ...]
"""Budgets of a path in output tokens, increasing."""


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


@dataclass(frozen=True)
class LadderLimits:
    """Limits of ladders, with an estimate of the device memory of captures.

    Captures share one pool: the largest budget takes what its tokens need, and each graph adds what its
    kernels' parameters take. `EncoderConfig.max_graph_bytes` enforces a limit at the capture.
    """

    max_graphs: int
    """Budgets of each path, at most; at least 1."""
    max_bytes: int | None = None
    """Device memory of all captures, at most; None: no limit."""
    only_kept: bool = True
    """Whether to leave out budgets that `mode: auto` will not keep; with `mode: full` all are captured."""
    # Estimated from the widths of the same tower in 16 bits: the values that are alive in a block, and 27
    # blocks of kernel nodes.
    bytes_per_token: int = 128 * 2**10
    """Of the largest budget."""
    bytes_per_graph: int = 8 * 2**20

    def num_bytes(self, largest_budget: int, num_graphs: int) -> int:
        """Bytes of `num_graphs` captures, the largest of `largest_budget` output tokens."""
        return self.bytes_per_token * largest_budget + self.bytes_per_graph * num_graphs

    def allows(self, largest_budget: int, num_graphs: int) -> bool:
        """Whether so many captures, the largest of `largest_budget` output tokens, fit into the memory."""
        return self.max_bytes is None or self.num_bytes(largest_budget, num_graphs) <= self.max_bytes


def ladders_by_length(
    demands: Sequence[int], candidates: NDArray[np.int64], costs: BatchCosts, max_graphs: int
) -> list[tuple[float, Ladder]]:
    """The cheapest ladder of 1, 2, ... budgets that ends with the largest candidate, after its cost.

    Let c_1 < ... < c_n be the candidates, and A(i, j) the cost of the demands in (c_i, c_j] when c_j serves
    them, each at the cheaper of c_j's replay and its exact shape. The cheapest k budgets that end with c_j
    serve the demands up to c_j at

        P(k, j) = min over i < j of P(k - 1, i) + A(i, j),    P(0, 0) = 0,

    and those above c_n run at their exact shapes. For one j, all A(i, j) are one cumulative sum, and all k
    are one array operation, so n candidates take n steps of O(n k).

    Args:
        demands: the output tokens of every batch.
        candidates: the budgets to choose from, increasing.
        max_graphs: budgets in a ladder, at most.
    """
    tokens, weights = np.unique(np.asarray(demands, dtype=np.int64), return_counts=True)
    exact, replay = costs.exact(tokens), costs.replay(candidates)
    # The demands in (c_j-1, c_j] are tokens[ends[j - 1] : ends[j]].
    ends = np.searchsorted(tokens, candidates, side="right")
    starts = np.concatenate([[0], ends[:-1]])
    above = float((weights * exact)[ends[-1] :].sum())

    num = len(candidates)
    depth = min(max_graphs, num)
    serving = np.full((depth + 1, num + 1), np.inf)
    serving[0, 0] = 0.0
    below = np.zeros((depth + 1, num + 1), dtype=np.int64)
    for j in range(num):
        each = weights[: ends[j]] * np.minimum(replay[j], exact[: ends[j]])
        onwards = np.cumsum(each[::-1])[::-1][starts[: j + 1]]
        options = serving[:-1, : j + 1] + onwards
        choice = options.argmin(axis=1)
        below[1:, j + 1] = choice
        serving[1:, j + 1] = np.take_along_axis(options, choice[:, None], axis=1)[:, 0]
    found = []
    for length in range(1, depth + 1):
        budgets, end = [], num
        for rest in range(length, 0, -1):
            budgets.append(int(candidates[end - 1]))
            end = int(below[rest, end])
        found.append((float(serving[length, num]) + above, tuple(reversed(budgets))))
    return found


def cheapest_together(
    found: Mapping[str, Sequence[tuple[float, Ladder]]], limits: LadderLimits
) -> tuple[float, tuple[Ladder, ...]]:
    """The cost and the ladders of least cost together within the memory, one of each path's; with equal
    costs, of the fewest graphs. A graph for each path must fit.
    """
    least, best = np.inf, tuple[Ladder, ...]()
    combinations = itertools.product(*found.values())
    for chosen in sorted(combinations, key=lambda each: sum(len(ladder) for _, ladder in each)):
        cost = sum(cost for cost, _ in chosen)
        ladders = tuple(ladder for _, ladder in chosen)
        fits = limits.allows(max(ladder[-1] for ladder in ladders), sum(map(len, ladders)))
        if fits and cost * (1 + _ROUNDING) < least:
            least, best = cost, ladders
    return least, best
