"""The search for the ladders of least cost, by dynamic programming over the sorted demands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.tuning.costs import BatchCosts, MemoryModel

# Sums of the same costs in another order differ by rounding; that is no reason for another graph.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class LadderLimits:
    """Limits of ladders.

    Raises:
        InputError: `max_graphs` or `granularity` is not positive.
    """

    max_graphs: int
    """Budgets of each path, at most."""
    max_bytes: int | None = None
    """Device memory of all captures by `memory`'s estimate, at most; None: no limit."""
    maximum: int | None = None
    """Output tokens of the largest budget, at most; None: those of the largest request or demand."""
    granularity: int = 1
    """Budgets are multiples of this, but for those that a smallest or largest budget bounds."""
    memory: MemoryModel = field(default_factory=MemoryModel)
    only_kept: bool = True
    """Whether to leave out budgets that `mode: auto` will not keep; with `mode: full` all are captured."""

    def __post_init__(self) -> None:
        check_positive(max_graphs=self.max_graphs, granularity=self.granularity)


def check_positive(**counts: int) -> None:
    """Raises InputError for a count below 1, by its name."""
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name}: expected at least 1; got {count}")


def round_up(count: int, granularity: int) -> int:
    """The smallest multiple of `granularity` that is not below `count`."""
    return -(-count // granularity) * granularity


def candidate_budgets(
    demands: Sequence[int], minimum: int, maximum: int, granularity: int
) -> NDArray[np.int64]:
    """(n,) increasing: the demands up to `maximum`, each rounded up to a multiple of `granularity`, and kept
    between `minimum` and `maximum`.
    """
    served = [round_up(tokens, granularity) for tokens in demands if tokens <= maximum]
    return np.unique(np.clip(np.array(served, dtype=np.int64), minimum, maximum))


class LadderSearch:
    """The cheapest ladder of one path for every number of budgets and every largest budget.

    Let c_1 < ... < c_n be the candidates, and A(i, j) the cost of the demands in (c_i, c_j] when c_j serves
    them, each at the cheaper of c_j's replay and its exact shape. The cheapest k budgets that end with c_j
    serve the demands up to c_j at

        P(k, j) = min over i < j of P(k - 1, i) + A(i, j),    P(0, 0) = 0,

    and those above run at their exact shapes. For one j, all A(i, j) are one cumulative sum, and all k are
    one array operation, so n candidates take n steps of O(n k).

    Args:
        demands: the output tokens of every batch.
        candidates: the budgets to choose from, increasing.
        max_graphs: budgets in a ladder, at most.
        serve_largest: whether a ladder must end with the last candidate.
    """

    def __init__(
        self,
        demands: Sequence[int],
        candidates: NDArray[np.int64],
        costs: BatchCosts,
        max_graphs: int,
        *,
        serve_largest: bool = False,
    ) -> None:
        self.candidates = candidates
        tokens, weights = np.unique(np.asarray(demands, dtype=np.int64), return_counts=True)
        exact = costs.exact(tokens)
        replay = costs.replay(candidates)
        # The demands in (c_j-1, c_j] are tokens[ends[j - 1] : ends[j]].
        ends = np.searchsorted(tokens, candidates, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        above = np.append(np.cumsum((weights * exact)[::-1])[::-1], 0.0)[ends]

        num = len(candidates)
        depth = min(max_graphs, num)
        serving = np.full((depth + 1, num + 1), np.inf)
        serving[0, 0] = 0.0
        self._below = np.zeros((depth + 1, num + 1), dtype=np.int64)
        for j in range(num):
            each = weights[: ends[j]] * np.minimum(replay[j], exact[: ends[j]])
            onwards = np.cumsum(each[::-1])[::-1][starts[: j + 1]]
            options = serving[:-1, : j + 1] + onwards
            choice = options.argmin(axis=1)
            self._below[1:, j + 1] = choice
            serving[1:, j + 1] = np.take_along_axis(options, choice[:, None], axis=1)[:, 0]
        self._costs = serving[1:, 1:] + above
        if serve_largest:
            self._costs[:, :-1] = np.inf

    def costs_up_to(self, largest: ArrayLike) -> NDArray[np.float64]:
        """(max graphs, sizes): the least cost of 1, 2, ... budgets up to each size; infinite without a
        ladder.
        """
        least = np.minimum.accumulate(self._costs, axis=1)
        impossible = np.full((len(least), 1), np.inf)
        return np.hstack([impossible, least])[:, np.searchsorted(self.candidates, largest, side="right")]

    def ladder(self, num_graphs: int, largest: int) -> tuple[int, ...]:
        """The cheapest ladder of that many budgets of at most `largest`; there must be one."""
        fitting = int(np.searchsorted(self.candidates, largest, side="right"))
        end = int(self._costs[num_graphs - 1, :fitting].argmin()) + 1
        budgets = []
        for graphs in range(num_graphs, 0, -1):
            budgets.append(int(self.candidates[end - 1]))
            end = int(self._below[graphs, end])
        assert end == 0
        return tuple(reversed(budgets))


def cheapest_ladders(
    searches: Mapping[str, LadderSearch], limits: LadderLimits
) -> dict[str, tuple[int, ...]]:
    """The ladder of every path, by its name, of the least cost together within the memory.

    Only the largest of all budgets and the number of all graphs tie the paths together: both are enumerated.
    Of ladders of equal cost, those with the fewest graphs are taken.

    Raises:
        InputError: no budget of each path fits into the memory.
    """
    max_bytes, memory = limits.max_bytes, limits.memory
    every = np.unique(np.concatenate([search.candidates for search in searches.values()]))
    tops = every[-1:] if max_bytes is None else every
    costs = [search.costs_up_to(tops) for search in searches.values()]
    best, chosen = np.inf, None
    for counts in sorted(itertools.product(*(range(1, len(cost) + 1) for cost in costs)), key=sum):
        together = np.sum([cost[count - 1] for cost, count in zip(costs, counts, strict=True)], axis=0)
        if max_bytes is not None:
            together[tops > memory.largest_budget(max_bytes, sum(counts))] = np.inf
        position = int(together.argmin())
        if together[position] * (1 + _ROUNDING) < best:
            best, chosen = together[position], (counts, int(tops[position]))
    if chosen is None:
        raise InputError(
            f"max_bytes: expected enough for a budget of each path, {len(searches)} graphs; the memory model "
            f"needs {memory.num_bytes(int(every[0]), len(searches))} bytes for {every[0]} output tokens, and "
            f"more for larger ones; got {max_bytes}"
        )
    counts, top = chosen
    return {
        path: search.ladder(count, top)
        for (path, search), count in zip(searches.items(), counts, strict=True)
    }
