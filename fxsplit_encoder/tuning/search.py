"""The search for the ladders of least cost, by dynamic programming over the sorted demands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxsplit_encoder.tuning.costs import BatchCosts

# Sums of the same costs in another order differ by rounding; that is no reason for another graph.
_ROUNDING = 1e-12

Ladder = tuple[int, ...]
"""Budgets of a path in output tokens, increasing."""


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
