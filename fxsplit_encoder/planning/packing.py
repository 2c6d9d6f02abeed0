"""Packs items into batches, by greedy rules or by predicted costs."""

from __future__ import annotations

import functools
import itertools
import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fxsplit_encoder.planning.costs import PathTable
from fxsplit_encoder.planning.limits import smallest_fitting
from fxsplit_encoder.planning.plan import Capacity, Loads


def pack_greedy(
    loads: Loads, capacity: Capacity, defer_budgets: Mapping[str, Sequence[int]] | None = None
) -> list[list[int]]:
    """Packs by next-fit in ascending order of tokens: a batch grows until the next item would exceed a limit.
    An item that exceeds a limit by itself is a batch of its own, after all others. Returns the positions of
    the items of every batch.

    Args:
        defer_budgets: the increasing budgets of each path, the last at least its maximum. An item then starts
            the next batch although it fits, where on some path the budgets of the batch so far and of the
            item alone are together below that of both, and the item's is not smaller (vLLM 0.33's rule).
    """
    columns, limits = zip(*_limited(loads, capacity), ([1] * len(loads), capacity.max_items), strict=True)
    vectors = list(zip(*columns, strict=True))
    deferring = [
        (position, defer_budgets[path])
        for position, path in enumerate(capacity.tokens)
        if defer_budgets is not None and defer_budgets[path]
    ]
    batches: list[list[int]] = []
    load: Sequence[int] = [0] * len(limits)
    for index in _ascending(loads, capacity):
        item = vectors[index]
        merged = list(map(operator.add, load, item))
        fits = batches and all(map(operator.le, merged, limits))
        if fits and not any(_defers(budgets, load[i], item[i]) for i, budgets in deferring):
            batches[-1].append(index)
            load = merged
        else:
            batches.append([index])
            load = item
    return batches


def _limited(loads: Loads, capacity: Capacity) -> Sequence[tuple[Sequence[int], int]]:
    """Returns what each item takes up of every limit but the number of items, and the limit: tokens of each
    path, frames, segments.
    """
    limits = [(loads.tokens[path], most) for path, most in capacity.tokens.items()]
    limits.append((loads.frames, capacity.max_frames))
    if capacity.max_segments is not None:
        limits.append((loads.segments, capacity.max_segments))
    return limits


def _ascending(loads: Loads, capacity: Capacity) -> list[int]:
    """Returns the items by total tokens, but those that exceed a limit by themselves last."""
    last = _above(_limited(loads, capacity))
    order = sorted(range(len(loads)), key=loads.totals.__getitem__)
    return sorted(order, key=last.__contains__) if last else order


def _defers(budgets: Sequence[int], load: int, tokens: int) -> bool:
    merged = smallest_fitting(budgets, load + tokens)
    if tokens == 0 or merged is None:
        return False
    current, alone = smallest_fitting(budgets, load), smallest_fitting(budgets, tokens)
    assert current is not None, "a batch has outgrown the budgets"
    assert alone is not None, "an item that fits has no budget"
    return current + alone < merged and alone >= current


# Up to this many items the cheapest of all partitions is found. Each item multiplies the work by 3.
_MAX_ITEMS_SOLVED_EXACTLY = 10

# More tokens than any batch has: the tables answer with an infinite cost.
_BEYOND_THE_END = 1 << 60


def pack_by_cost(
    loads: Loads, tables: Mapping[str, PathTable], capacity: Capacity, per_batch: float = 0.0
) -> list[list[int]]:
    """Packs into the batches of least predicted cost.

    Up to ten items this is the optimum over all partitions. More items are cut into runs, the optimum over
    all cuts of the order of `pack_greedy`, and with several paths also of an order that alternates between
    small and large. So it never costs more than `pack_greedy`.

    Args:
        loads: of the items. An item above the largest batch of a path is a batch of its own.
        tables: the costs of each path; no batch has more tokens there than its `largest`.
        capacity: limits of `pack_greedy`; more than `max_items` run eagerly, if that cost is known.
        per_batch: the cost that every batch adds.

    Returns the positions of the items of every batch, increasing, the batches by their first ones.
    """
    prices = _Prices(loads, tables, capacity, per_batch)
    alone = _above((tokens, table.largest) for tokens, table in prices.paths)
    if not alone:
        return sorted(_pack(prices, capacity)) if len(loads) else []
    kept = sorted(set(range(len(loads))) - alone)
    packed = _pack(_Prices(loads.of(kept), tables, capacity, per_batch), capacity) if kept else []
    return sorted([*([kept[item] for item in batch] for batch in packed), *([item] for item in alone)])


def _pack(prices: _Prices, capacity: Capacity) -> list[list[int]]:
    num_items, max_items = len(prices.items), capacity.max_items
    if num_items <= _MAX_ITEMS_SOLVED_EXACTLY:
        return _cheapest_partition(prices, max_items)
    ascending = _ascending(prices.items, capacity)
    orders = [ascending]
    if len(prices.paths) > 1:
        smaller_half, larger_half = ascending[: (num_items + 1) // 2], ascending[(num_items + 1) // 2 :]
        pairs = itertools.zip_longest(smaller_half, reversed(larger_half))
        orders.append([item for pair in pairs for item in pair if item is not None])
    return min((_cheapest_cut(prices, order, max_items) for order in orders), key=operator.itemgetter(0))[1]


class _Prices:
    """Costs of batches by the sums of their items' loads; arguments as of `pack_by_cost`."""

    def __init__(
        self, loads: Loads, tables: Mapping[str, PathTable], capacity: Capacity, per_batch: float
    ) -> None:
        self.items = loads
        self.paths = [(loads.tokens[path], table) for path, table in tables.items()]
        self._max_frames = capacity.max_frames
        self._per_batch = per_batch
        # Limits that all items together keep are left out, to save time.
        always_held = [table.always_held for _, table in self.paths if table.always_held is not None]
        self.knows_eager = all(table.path_costs.eager for _, table in self.paths)
        """Whether batches of more items than captures hold may run eagerly, at a known cost."""
        self._limits_frames = sum(loads.frames) > capacity.max_frames
        self._limits_segments = bool(always_held) and sum(loads.segments) > min(always_held)
        rows = [tokens for tokens, _ in self.paths]
        rows += [loads.frames] * self._limits_frames + [loads.segments] * self._limits_segments
        self.loads = np.array(rows, dtype=np.int64)
        """(rows, items): what `of_sums` takes the sums of."""

    def of_sums(self, sums: NDArray[np.int64], *, one_segment: bool = False) -> NDArray[np.float64]:
        """The costs of batches by the sums of their loads, (rows, ...); infinite above the largest batch."""
        segments = sums[-1] if self._limits_segments else None
        replayable = sums[len(self.paths)] <= self._max_frames if self._limits_frames else None
        costs: NDArray[np.float64] = np.array(self._per_batch)
        for (_, table), tokens in zip(self.paths, sums, strict=False):
            costs = costs + table.costs(tokens, segments, replayable, one_segment=one_segment)
        return costs

    def of_eager_sums(self, sums: NDArray[np.int64]) -> NDArray[np.float64]:
        """As `of_sums`, for batches of more items than captures hold, which run eagerly."""
        if not self.knows_eager:
            return np.full(sums.shape[1:], np.inf)
        costs: NDArray[np.float64] = np.array(self._per_batch)
        for (_, table), tokens in zip(self.paths, sums, strict=False):
            costs = costs + table.eager_costs(tokens)
        return costs

    def of_singles(self) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Returns the items that have captures of a single segment, and what each costs alone."""
        if not any(table.has_one_segment for _, table in self.paths):
            return np.empty(0, dtype=np.intp), np.empty(0)
        items = np.flatnonzero(np.equal(self.items.segments, 1))
        return items, self.of_sums(self.loads[:, items], one_segment=True)

    def longest_run(self) -> int:
        """Returns the most items of a batch: as many of the smallest as all paths together hold."""
        sizes = sorted(map(sum, zip(*(tokens for tokens, _ in self.paths), strict=True)))
        return bisect_right(list(itertools.accumulate(sizes)), sum(table.largest for _, table in self.paths))


def _above(limits: Iterable[tuple[Sequence[int], int]]) -> set[int]:
    """Returns the positions of items above one of the limits, (loads, maximum)."""
    return {
        item
        for loads, maximum in limits
        if max(loads, default=0) > maximum
        for item, load in enumerate(loads)
        if load > maximum
    }


def _cheapest_cut(prices: _Prices, order: list[int], max_items: int) -> tuple[float, list[list[int]]]:
    num_items = len(order)
    longest = prices.longest_run()
    if not prices.knows_eager:
        longest = min(max_items, longest)
    # Column n holds the sums of the first n items. Runs past the last item have more tokens than any batch.
    before = np.full((len(prices.loads), num_items + longest), _BEYOND_THE_END)
    before[:, 0] = 0
    prices.loads[:, order].cumsum(axis=1, out=before[:, 1 : num_items + 1])
    sums = before[:, _ends(num_items, longest)] - before[:, :num_items, None]
    costs = prices.of_sums(sums[:, :, :max_items])
    if longest > max_items:
        costs = np.concatenate([costs, prices.of_eager_sums(sums[:, :, max_items:])], axis=1)
    singles, single_costs = prices.of_singles()
    if singles.size:
        costs[np.argsort(order)[singles], 0] = single_costs

    # best[i]: the least cost of all items from the i-th on.
    best = np.zeros(num_items + longest)
    length = [0] * num_items
    for start in range(num_items - 1, -1, -1):
        totals = costs[start]
        totals += best[start + 1 : start + 1 + longest]
        shortest = totals.argmin()
        best[start] = totals[shortest]
        length[start] = int(shortest) + 1
    batches = []
    start = 0
    while start < num_items:
        batches.append(sorted(order[start : start + length[start]]))
        start += length[start]
    return best.item(0), batches


@functools.lru_cache(maxsize=64)
def _ends(num_items: int, longest: int) -> NDArray[np.intp]:
    """(items, longest): where the runs of 1, 2, ... items from each one end."""
    return np.arange(num_items)[:, None] + np.arange(1, longest + 1)


# --- the optimum over all partitions
#
# Sets of items are bit masks. The cheapest partition of a set S is the cheapest, over its subsets T with the
# highest item of S, of T as one batch and the cheapest partition of S without T. All sets with the same
# highest item are solved at once.


def _cheapest_partition(prices: _Prices, max_items: int) -> list[list[int]]:
    num_items = len(prices.items)
    sums = np.zeros((len(prices.loads), 1 << num_items), dtype=np.int64)
    for item in range(num_items):
        bit = 1 << item
        np.add(sums[:, :bit], prices.loads[:, item, None], out=sums[:, bit : 2 * bit])
    costs = prices.of_sums(sums)
    singles, single_costs = prices.of_singles()
    costs[1 << singles] = single_costs
    if num_items > max_items:
        many = _bit_counts(num_items) > max_items
        costs[many] = prices.of_eager_sums(sums[:, many])

    best = np.zeros(1 << num_items)
    for highest in range(num_items - 1):
        bit = 1 << highest
        part, rest, starts = _splits(highest)
        totals = costs[bit : 2 * bit].take(part) + best.take(rest)
        np.minimum.reduceat(totals, starts, out=best[bit : 2 * bit])
    batches = []
    remaining = (1 << num_items) - 1
    while remaining:
        highest = remaining.bit_length() - 1
        bit = 1 << highest
        lower = remaining - bit
        subsets = _subsets(lower)
        chosen = int(subsets[(costs.take(subsets + bit) + best.take(lower - subsets)).argmin()])
        batches.append([item for item in range(highest) if chosen >> item & 1] + [highest])
        remaining = lower - chosen
    return batches


@functools.lru_cache(maxsize=_MAX_ITEMS_SOLVED_EXACTLY)
def _splits(num_items: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Every set of items with each of its subsets: the subsets, what they leave, where each set begins."""
    every = np.arange(1 << num_items)
    sets, part = np.nonzero((every[:, None] & every) == every)
    return part, sets - part, np.searchsorted(sets, every)


@functools.lru_cache(maxsize=1 << _MAX_ITEMS_SOLVED_EXACTLY)
def _subsets(whole: int) -> NDArray[np.intp]:
    every = np.arange(whole + 1)
    return np.flatnonzero((every & whole) == every)


@functools.lru_cache(maxsize=_MAX_ITEMS_SOLVED_EXACTLY)
def _bit_counts(num_items: int) -> NDArray[np.intp]:
    return np.array([mask.bit_count() for mask in range(1 << num_items)])
