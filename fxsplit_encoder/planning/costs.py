"""Costs of a batch on each path: measured points, and tables of the predicted costs."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxsplit_encoder.errors import InputError

Points = tuple[tuple[int, float], ...]
"""(output tokens, milliseconds), tokens increasing."""

REPLAY_LAUNCH_TOKENS = 64
"""Without measurements a replay is priced by its tokens and this many more for its launches."""
# One H200 replays 64 and 256 tokens of a 27-block tower in 1.7 and 3.5 ms, so its fixed part is worth about
# 130 tokens. Half of that keeps the choice near the least padding.

EXACT_LAUNCH_TOKENS = 256
"""The same for the exact shape, whose launches come one by one from the host."""
# There a small batch takes 5.3 ms: the launches take longer than the arithmetic, at 0.0168 ms per token.

EXACT_TOLERANCE = 1.02
"""`mode: auto` keeps no budget whose exact shape costs at most this much more than a replay of the same size:
the replay costs the same for every smaller batch, the exact shape less."""

HOST_MS_PER_BATCH = 0.3
"""Host milliseconds that a batch adds, to decide whether it is worth splitting one."""

# The price per token of a fallback that was not measured: above any replay, so that items are replayed where
# they can be. It grows with the tokens, or a batch that has to fall back would draw others in.
_UNMEASURED_FALLBACK = 1e6


@dataclass(frozen=True)
class CostCurve:
    """Costs by token counts: constant before the first measured point, linear between points, and after the
    last one with the last slope, if it rises (in proportion after one point). Infinite without points.
    """

    points: Points

    def at(self, tokens: int) -> float:
        """Returns the cost of this many tokens."""
        starts, bases, slopes = self._pieces
        piece = bisect_right(starts, tokens) - 1
        return bases[piece] + slopes[piece] * (tokens - starts[piece])

    def __call__(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Returns the costs of many token counts."""
        counts = np.asarray(tokens)
        starts, bases, slopes = map(np.array, self._pieces)
        piece = np.searchsorted(starts, counts, side="right") - 1
        costs: NDArray[np.float64] = bases[piece] + slopes[piece] * (counts - starts[piece])
        return costs

    @functools.cached_property
    def _pieces(self) -> tuple[list[int], list[float], list[float]]:
        """The start, the cost there and the slope of each linear piece."""
        if not self.points:
            return [0], [math.inf], [0.0]
        counts, costs = map(list, zip(*self.points, strict=True))
        slopes = [
            (second - first) / (stop - start)
            for (start, first), (stop, second) in itertools.pairwise(self.points)
        ]
        last = max(0.0, slopes[-1]) if slopes else costs[0] / counts[0] if counts[0] else 0.0
        return [0, *counts], [costs[0], *costs], [0.0, *slopes, last]


@dataclass(frozen=True)
class PathCosts:
    """Costs of one path at one combination of axis keys, without its attention over segments.

    A fallback is the cheaper of `exact` and `eager`; of unknown cost, it is taken only where no replay
    serves. InputError: the tokens of either do not increase.
    """

    replay: Mapping[int, float] = field(default_factory=dict)
    """Budget -> milliseconds of a replay, of all that are captured."""
    one_segment: Mapping[int, float] = field(default_factory=dict)
    """The same for batches of one attention segment, where they have a capture."""
    exact: Points = ()
    """Of the compiled program at its exact shape: measured times, 5 % more where they are bound by the host,
    and no less than the host needs. Empty: not measured, or it cannot run."""
    eager: Points = ()
    attention: float = 0.0
    """Milliseconds per attended pair (squared length of a segment in patches)."""
    max_segments: Mapping[int, int] = field(default_factory=dict)
    """Attention segments of a budget's capture; without an entry: any number."""
    max_tokens: Mapping[int, int] = field(default_factory=dict)
    """Output tokens of a budget's capture; without an entry: the budget."""
    not_needed: Collection[int] = ()
    """Budgets without a replay, because the exact shape was measured to be as fast."""
    measured: bool = True
    """Whether the costs are milliseconds, and not arbitrary units."""

    def __post_init__(self) -> None:
        for name, points in (("exact", self.exact), ("eager", self.eager)):
            tokens = [count for count, _ in points]
            if any(second <= first for first, second in itertools.pairwise([0, *tokens])):
                raise InputError(
                    f"{name}: the tokens of its points must be positive and increase; got {tokens}"
                )

    @classmethod
    def unmeasured(cls, budgets: Iterable[int], max_segments: Mapping[int, int] | None = None) -> PathCosts:
        """Makes costs without measurements, in arbitrary units: least padding, then fewest replays."""
        replay = {budget: float(budget + REPLAY_LAUNCH_TOKENS) for budget in budgets}
        return cls(replay, max_segments=dict(max_segments or {}), measured=False)

    def table(self, budgets: tuple[int, ...], largest: int, skippable: bool) -> PathTable:
        """Returns the cached tables over token counts for increasing `budgets`, each with a replay cost.
        `largest` is the most tokens of a batch; if `skippable`, one without tokens skips the path.
        """
        key = (budgets, largest, skippable)
        if (table := self._tables.get(key)) is None:
            table = self._tables[key] = PathTable(self, *key)
        return table

    @functools.cached_property
    def exact_curve(self) -> CostCurve:
        """The cost of any size at its exact shape."""
        return CostCurve(self.exact)

    @functools.cached_property
    def eager_curve(self) -> CostCurve:
        """The cost of any size in the eager forward."""
        return CostCurve(self.eager)

    @functools.cached_property
    def _tables(self) -> dict[tuple[tuple[int, ...], int, bool], PathTable]:
        return {}


@dataclass(frozen=True)
class CostModel:
    """Costs of batches, to choose between ways to pack and to run them."""

    paths: Mapping[tuple[str, tuple[Hashable, ...]], PathCosts]
    """By (path, axis keys)."""
    per_batch: float = 0.0
    """Host milliseconds that each batch adds."""


class PathTable:
    """The costs of one path as tables over token counts; arguments as of `PathCosts.table`. Budgets below the
    last one that is too small for the segments of a batch are not used.
    """

    def __init__(
        self,
        path_costs: PathCosts,
        budgets: tuple[int, ...],
        largest: int,
        skippable: bool,
    ) -> None:
        assert not budgets or budgets[-1] <= largest, "a budget lies above the largest batch"
        self.path_costs = path_costs
        self.budgets = budgets
        held = [min(budget, path_costs.max_tokens.get(budget, budget)) for budget in budgets]
        self.holds = tuple(itertools.accumulate(reversed(held), min))[::-1]
        """Output tokens that each budget and all larger ones hold."""
        self.largest = largest
        self.skippable = skippable
        self.max_segments = tuple(map(path_costs.max_segments.get, budgets))
        """Attention segments that each budget holds; None: any number."""
        self.always_held = min((count for count in self.max_segments if count is not None), default=None)
        """Segments up to which no budget is ruled out; None: any number."""
        several = [path_costs.replay[budget] for budget in budgets]
        single = [path_costs.one_segment.get(budget, path_costs.replay[budget]) for budget in budgets]
        self._prices = {False: several, True: single}
        # Entry i: which of budgets[i:] is cheapest. Measured times need not rise with the budget.
        self._cheapest = {one: _cheapest_of_rest(prices) for one, prices in self._prices.items()}
        self.has_one_segment = single != several
        self.predicts_fallbacks = bool(path_costs.exact or path_costs.eager)
        """Whether the cost of a fallback is a time."""

    # --- one batch

    def replay(
        self, tokens: int, segments: int | None, *, smallest: bool = False
    ) -> tuple[int, float] | None:
        """Returns the cheapest, or `smallest`, budget that holds a batch, and its cost; None: none does."""
        position = bisect_left(self.holds, tokens)
        if segments is not None and self.always_held is not None and segments > self.always_held:
            position = max(position, self._first_that_holds(segments))
        if position == len(self.budgets):
            return None
        one = segments == 1
        if not smallest:
            position = self._cheapest[one][position]
        return self.budgets[position], self._prices[one][position]

    def fallback(self, tokens: int) -> tuple[float, bool]:
        """Returns the cost of a batch without a replay, and whether it is that of the eager forward."""
        # Without the tables, which are as long as the largest budget.
        if tokens == 0 or not self.predicts_fallbacks:
            return _UNMEASURED_FALLBACK * (tokens + 1), False
        exact, eager = self.path_costs.exact_curve.at(tokens), self.path_costs.eager_curve.at(tokens)
        return (eager, True) if eager < exact else (exact, False)

    def _first_that_holds(self, segments: int) -> int:
        """Position of the first budget that, with all larger ones, holds `segments` segments."""
        too_small = (i for i, held in enumerate(self.max_segments) if held is not None and held < segments)
        return max(too_small, default=-1) + 1

    # --- many batches

    def costs(
        self,
        tokens: NDArray[np.int64],
        segments: NDArray[np.int64] | None = None,
        replayable: NDArray[np.bool_] | None = None,
        *,
        one_segment: bool = False,
    ) -> NDArray[np.float64]:
        """Returns the least costs of batches by their output `tokens`, any shape; infinite above `largest`.
        Their attention `segments` rule out budgets (None: none); `replayable` says which may be replayed
        (None: all), `one_segment` whether all have a single segment.
        """
        if segments is None and replayable is None and not one_segment:
            return self._best.take(tokens, mode="clip")
        needed = tokens
        if segments is not None:
            needed = np.maximum(needed, self._tokens_for_segments.take(segments, mode="clip"))
        if replayable is not None:
            needed = np.where(replayable, needed, self.largest + 1)
        replays = self._single_replays if one_segment else self._replays
        costs = np.minimum(replays.take(needed, mode="clip"), self._fallbacks.take(tokens, mode="clip"))
        if self.skippable:
            costs[tokens == 0] = 0.0
        return costs

    def eager_costs(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the costs of batches in the eager forward; infinite above the measured tokens."""
        return self._eager.take(tokens, mode="clip")

    # Each table has an entry for every count from 0 to `largest`, and one more for all counts above.

    @functools.cached_property
    def _replays(self) -> NDArray[np.float64]:
        return self._replay_table(False)

    @functools.cached_property
    def _single_replays(self) -> NDArray[np.float64]:
        return self._replay_table(True)

    def _replay_table(self, one_segment: bool) -> NDArray[np.float64]:
        prices = self._prices[one_segment]
        cheapest = np.array([*(prices[i] for i in self._cheapest[one_segment]), np.inf])
        return cheapest[np.searchsorted(self.holds, np.arange(self.largest + 2))]

    @functools.cached_property
    def _fallbacks(self) -> NDArray[np.float64]:
        tokens = np.arange(self.largest + 1)
        cheaper = np.minimum(self.path_costs.exact_curve(tokens), self.path_costs.eager_curve(tokens))
        # An empty batch is no shape to run: where a replay of padding alone serves it, that is taken.
        never = (tokens == 0) | (not self.predicts_fallbacks)
        return np.append(np.where(never, _UNMEASURED_FALLBACK * (tokens + 1), cheaper), np.inf)

    @functools.cached_property
    def _eager(self) -> NDArray[np.float64]:
        tokens = np.arange(self.largest + 1)
        most = self.path_costs.eager[-1][0] if self.path_costs.eager else -1
        costs = np.where(tokens <= most, self.path_costs.eager_curve(tokens), np.inf)
        if self.skippable:
            costs[0] = 0.0
        return np.append(costs, np.inf)

    @functools.cached_property
    def _best(self) -> NDArray[np.float64]:
        best = np.minimum(self._replays, self._fallbacks)
        if self.skippable:
            best[0] = 0.0
        return best

    @functools.cached_property
    def _tokens_for_segments(self) -> NDArray[np.int64]:
        """By numbers of segments: one token more than the last budget too small for them hold."""
        most = max((count for count in self.max_segments if count is not None), default=0)
        above = [0, *(held + 1 for held in self.holds[:-1]), self.largest + 1]
        return np.array([above[self._first_that_holds(count)] for count in range(most + 2)])


def _cheapest_of_rest(prices: list[float]) -> list[int]:
    cheapest: list[int] = []
    for position in reversed(range(len(prices))):
        last = cheapest[-1] if cheapest else position
        cheapest.append(position if prices[position] <= prices[last] else last)
    return cheapest[::-1]
