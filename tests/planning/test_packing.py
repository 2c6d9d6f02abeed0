from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.planning import packing
from fxsplit_encoder.planning.costs import PathCosts, PathTable
from fxsplit_encoder.planning.packing import pack_by_cost, pack_greedy
from fxsplit_encoder.planning.plan import Capacity, Item, Loads
from fxsplit_encoder.protocol import EncoderItemSpec

# A tower of 27 blocks on one H200: milliseconds.
H200 = PathCosts({64: 1.72, 256: 3.47, 1024: 17.7, 1764: 42.3}, exact=((256, 4.5), (268, 4.5), (1764, 29.6)))
TWO_PATHS = [
    PathCosts({272 << k: 3.0 + 0.0055 * (272 << k) for k in range(4)}, exact=((272, 5.5), (2176, 20.0))),
    PathCosts({100 << k: 1.5 + 0.009 * (100 << k) for k in range(5)}, exact=((100, 4.0), (1600, 18.0))),
]


def tables(paths: Sequence[PathCosts]) -> list[PathTable]:
    return [each.table(tuple(each.replay), max(each.replay), True) for each in paths]


class Problem:
    """Items (their tokens on every path, frames, segments), and what a batch of them costs, one at a time."""

    def __init__(
        self,
        paths: Sequence[PathCosts],
        items: Sequence[tuple[tuple[int, ...], int, int]],
        max_items: int = 8,
    ) -> None:
        self.tables = tables(paths)
        self.items = items
        self.max_items = max_items
        self.max_frames = 8
        self.per_batch = 0.15
        held_segments = [most for path_costs in paths for most in path_costs.max_segments.values()]
        self.max_segments = max(held_segments, default=0)

    def cost(self, batch: Sequence[int]) -> float:
        tokens, frames, segments = zip(*(self.items[i] for i in batch), strict=True)
        total = self.per_batch
        for table, count in zip(self.tables, map(sum, zip(*tokens, strict=True)), strict=True):
            if len(batch) > self.max_items:
                total += self.eager_cost(table, count)
                continue
            found = table.replay(count, sum(segments)) if sum(frames) <= self.max_frames else None
            best = min(table.fallback(count)[0], found[1] if found else float("inf"))
            total += best if count else 0.0
        return total

    @staticmethod
    def eager_cost(table: PathTable, count: int) -> float:
        """Infinite beyond what the eager forward was measured with."""
        costs = table.path_costs
        if not count:
            return 0.0
        return costs.eager_curve.at(count) if costs.eager and count <= costs.eager[-1][0] else float("inf")

    def total(self, batches: Sequence[Sequence[int]]) -> float:
        return sum(map(self.cost, batches))

    def allows(self, batch: Sequence[int]) -> bool:
        tokens = map(sum, zip(*(self.items[i][0] for i in batch), strict=True))
        fits = all(count <= table.largest for table, count in zip(self.tables, tokens, strict=True))
        return len(batch) == 1 or (fits and self.cost(batch) < float("inf"))

    @property
    def loads(self) -> Loads:
        names = [str(path) for path in range(len(self.tables))]
        return Loads(
            [
                Item(EncoderItemSpec(1, sum(tokens), dict(zip(names, tokens, strict=True))), frames, segments)
                for tokens, frames, segments in self.items
            ],
            names,
        )

    @property
    def capacity(self) -> Capacity:
        largest = {str(path): table.budgets[-1] for path, table in enumerate(self.tables)}
        return Capacity(largest, self.max_items, self.max_frames, self.max_segments or None)

    def pack(self) -> list[list[int]]:
        tables = {str(path): table for path, table in enumerate(self.tables)}
        return pack_by_cost(self.loads, tables, self.capacity, self.per_batch)

    def greedy(self, defer: bool) -> list[list[int]]:
        budgets = {str(path): table.budgets for path, table in enumerate(self.tables)}
        return pack_greedy(self.loads, self.capacity, budgets if defer else None)


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for position, batch in enumerate(partition):
            yield [*partition[:position], [first, *batch], *partition[position + 1 :]]


def cheapest(problem: Problem) -> float:
    costs: dict[tuple[int, ...], float] = {}

    def cost(batch: list[int]) -> float:
        key = tuple(batch)
        if key not in costs:
            costs[key] = problem.cost(batch) if problem.allows(batch) else float("inf")
        return costs[key]

    return min(sum(map(cost, partition)) for partition in partitions(range(len(problem.items))))


def random_problems(num_paths: int, sizes: range, count: int) -> Iterator[Problem]:
    """Images (half of them alike), with one path or two."""
    generator = random.Random(num_paths)
    for _ in range(count):
        num_items = generator.choice(sizes)
        if num_paths == 1:
            tokens = [(max(4, min(1900, int(generator.lognormvariate(5.3, 1.1)))),) for _ in range(num_items)]
        else:
            tokens = [(272, 100 * generator.choice([0, 0, 2, 3, 4, 6])) for _ in range(num_items)]
        yield Problem([H200] if num_paths == 1 else TWO_PATHS, [(each, 0, 1) for each in tokens])


@pytest.mark.parametrize("num_paths", [1, 2])
def test_small_requests_are_packed_as_cheaply_as_any_partition(num_paths: int) -> None:
    for problem in random_problems(num_paths, range(2, 8), 30):
        assert problem.total(problem.pack()) == pytest.approx(cheapest(problem))


@pytest.mark.parametrize("num_paths", [1, 2])
def test_cut_orders_are_within_five_percent_of_the_optimum(
    num_paths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = list(random_problems(num_paths, range(2, 11), 100))
    optima = [problem.total(problem.pack()) for problem in problems]
    monkeypatch.setattr(packing, "_MAX_ITEMS_SOLVED_EXACTLY", 0)
    ratios = [problem.total(problem.pack()) / best for problem, best in zip(problems, optima, strict=True)]
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) > 1 + 1e-9, "else both are one algorithm"
    assert sum(ratios) / len(ratios) < 1.05


ladders = st.dictionaries(st.integers(1, 60), st.floats(0.1, 50), min_size=1, max_size=5).map(
    lambda prices: dict(sorted(prices.items()))
)


@st.composite
def costs_of_a_path(draw: st.DrawFn) -> PathCosts:
    replay = draw(ladders)
    points = [tuple(sorted(draw(ladders).items())) for _ in range(2)]
    single = draw(st.dictionaries(st.sampled_from(list(replay)), st.floats(0.1, 50)))
    max_segments = draw(st.dictionaries(st.sampled_from(list(replay)), st.integers(1, 9)))
    # A larger budget holds more of them.
    max_segments = dict(zip(sorted(max_segments), sorted(max_segments.values()), strict=True))
    return PathCosts(
        replay, single, points[0], points[1] if draw(st.booleans()) else (), max_segments=max_segments
    )


item = st.tuples(st.integers(0, 65), st.integers(0, 5), st.integers(1, 5))


@settings(max_examples=80)
@given(
    st.lists(costs_of_a_path(), min_size=1, max_size=2),
    st.lists(st.tuples(item, st.integers(0, 65)), max_size=24),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_never_dearer_than_greedy_and_within_every_limit(
    paths: list[PathCosts],
    drawn: list[tuple[tuple[int, int, int], int]],
    max_items: int,
    generator: random.Random,
) -> None:
    items = [((first, second)[: len(paths)], frames, segments) for (first, frames, segments), second in drawn]
    problem = Problem(paths, items, max_items)
    batches = problem.pack()
    assert sorted(index for batch in batches for index in batch) == list(range(len(items)))
    assert all(map(problem.allows, batches))
    total = problem.total(batches)
    for defer in (False, True):
        assert total <= problem.total(problem.greedy(defer)) + 1e-6

    order = list(range(len(items)))
    generator.shuffle(order)
    permuted = Problem(paths, [items[index] for index in order], max_items)
    if len(items) <= 10 or len({sum(tokens) for tokens, _, _ in items}) == len(items):
        assert permuted.total(permuted.pack()) == pytest.approx(total)


def pack_by_the_rule(
    items: list[tuple[int, ...]], ladders: Sequence[list[int]], max_items: int, most: list[float], defer: bool
) -> list[list[int]]:
    """The rules, written down word by word: a batch is a list of items, looked at as a whole each time."""

    def total(what: int, batch: list[int]) -> int:
        return sum(items[index][what] for index in batch)

    def budget(path: int, batch: list[int]) -> int:
        return next(each for each in ladders[path] if each >= total(path, batch))

    def fits(batch: list[int]) -> bool:
        return len(batch) <= max_items and all(total(what, batch) <= most[what] for what in range(4))

    def gains(path: int, batch: list[int], item: int) -> bool:
        together, apart = budget(path, [*batch, item]), (budget(path, batch), budget(path, [item]))
        return items[item][path] > 0 and sum(apart) < together and apart[1] >= apart[0]

    def defers(batch: list[int], item: int) -> bool:
        return defer and any(gains(path, batch, item) for path in (0, 1))

    batches: list[list[int]] = []
    oversize = []
    for item in sorted(range(len(items)), key=lambda i: sum(items[i][:2])):
        if not fits([item]):
            oversize.append([item])
        elif batches and fits([*batches[-1], item]) and not defers(batches[-1], item):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches + oversize


budget_lists = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted)


@given(
    st.lists(
        st.tuples(st.integers(0, 45), st.integers(0, 45), st.integers(0, 5), st.integers(1, 4)), max_size=12
    ),
    st.tuples(budget_lists, budget_lists),
    st.tuples(st.integers(1, 6), st.integers(0, 10), st.none() | st.integers(1, 9)),
    st.booleans(),
)
def test_packing_smallest_first_and_deferring_follow_their_rules(
    items: list[tuple[int, ...]], ladders: Any, limits: tuple[int, int, int | None], defer: bool
) -> None:
    loads = [Item(EncoderItemSpec(1, a + b, {"a": a, "b": b}), frames, held) for a, b, frames, held in items]
    capacity = Capacity({"a": ladders[0][-1], "b": ladders[1][-1]}, *limits)
    budgets = dict(zip("ab", ladders, strict=True))
    packed = pack_greedy(Loads(loads, "ab"), capacity, budgets if defer else None)
    max_items, max_frames, max_segments = limits
    most = [ladders[0][-1], ladders[1][-1], max_frames, max_segments or math.inf]
    assert packed == pack_by_the_rule(items, ladders, max_items, most, defer)
