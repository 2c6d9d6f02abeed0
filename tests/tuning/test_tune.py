import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.config import Packing
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH, CostModel
from fxsplit_encoder.planning.limits import Limits, default_budgets
from fxsplit_encoder.planning.planner import build_plan
from fxsplit_encoder.tuning import tune
from fxsplit_encoder.tuning.search import (
    BatchCosts,
    Ladder,
    LadderLimits,
    cheapest_together,
    ladders_by_length,
    linear,
    rising,
)
from fxsplit_encoder.tuning.trace import MeasuredCosts, Request
from fxsplit_encoder.tuning.tune import Forecast, Judge, tune_trace

from ..instructions import instructions
from .test_recording import request

LARGEST = 9
demand_lists = st.lists(st.integers(1, LARGEST), min_size=1, max_size=8)
# Small costs, so that every choice matters: a budget or the exact shape, one budget more or less.
curves = st.builds(linear, st.integers(1, 6).map(float)) | st.builds(
    rising, st.dictionaries(st.integers(1, LARGEST), st.integers(1, 9).map(float), min_size=1, max_size=4)
)
cost_models = st.builds(BatchCosts, curves, curves)
memories = st.tuples(st.integers(1, 3), st.integers(0, 3))
"""Bytes of a token and of a graph."""


def ladders(largest: int, max_graphs: int) -> Iterator[tuple[int, ...]]:
    """Every ladder of at most so many budgets, of whatever sizes up to `largest`."""
    for count in range(1, max_graphs + 1):
        yield from itertools.combinations(range(1, largest + 1), count)


def cost_of(ladder: Sequence[int], demands: Sequence[int], costs: BatchCosts) -> float:
    """The definition: the smallest budget with room, or the exact shape where that costs less."""
    total = 0.0
    for tokens in demands:
        exact = float(costs.exact(tokens))
        fitting = [budget for budget in ladder if budget >= tokens]
        total += min(exact, float(costs.replay(fitting[0]))) if fitting else exact
    return total


def images(rng: random.Random, num_requests: int) -> list[Request]:
    return [
        request(*(max(16, round(rng.lognormvariate(6.2, 0.6))) for _ in range(rng.randint(1, 6))))
        for _ in range(num_requests)
    ]


def limited(max_graphs: int, max_bytes: int | None, memory: tuple[int, int]) -> LadderLimits:
    """With every budget that is captured, and an estimate of the memory in a few bytes."""
    return LadderLimits(max_graphs, max_bytes, False, *memory)


def by_length(demands: list[int], costs: BatchCosts, max_graphs: int) -> list[tuple[float, Ladder]]:
    return ladders_by_length(demands, np.unique(demands), costs, max_graphs)


@settings(max_examples=80)
@given(demand_lists, st.integers(1, 4), cost_models)
def test_no_ladder_of_any_sizes_that_serves_the_largest_costs_less(
    demands: list[int], max_graphs: int, costs: BatchCosts
) -> None:
    found = by_length(demands, costs, max_graphs)
    assert [len(ladder) for _, ladder in found] == list(range(1, min(max_graphs, len(set(demands))) + 1))
    for cost, ladder in found:
        assert cost == pytest.approx(cost_of(ladder, demands, costs))
        serving = [each for each in ladders(max(demands), len(ladder)) if each[-1] == max(demands)]
        shortest = min(cost_of(each, demands, costs) for each in serving if len(each) == len(ladder))
        assert cost == pytest.approx(shortest)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    cost_models,
    cost_models,
    memories,
    st.integers(8, 24),
)
def test_paths_share_the_memory_at_the_least_cost_together(
    first: list[int],
    second: list[int],
    first_costs: BatchCosts,
    second_costs: BatchCosts,
    memory: tuple[int, int],
    max_bytes: int,
) -> None:
    limits = limited(2, max_bytes, memory)
    found = {"a": by_length(first, first_costs, 2), "b": by_length(second, second_costs, 2)}
    largest = max(*first, *second)
    allowed = [
        (a_cost + b_cost, (a, b))
        for (a_cost, a), (b_cost, b) in itertools.product(*found.values())
        if limits.num_bytes(largest, len(a) + len(b)) <= max_bytes
    ]
    if allowed:
        cost, chosen = cheapest_together(found, limits)
        assert cost == pytest.approx(min(cost for cost, _ in allowed))
        assert chosen in [each for _, each in allowed]


def planned_cost(ladder: Sequence[int], batches: Sequence[int], costs: BatchCosts, packing: Packing) -> float:
    """The definition: only packing by cost compares a budget that fits with the exact shape."""
    if packing == "cost":
        return cost_of(ladder, batches, costs)
    fits = [min((b for b in ladder if b >= tokens), default=None) for tokens in batches]
    return sum(
        float(costs.exact(tokens) if budget is None else costs.replay(budget))
        for tokens, budget in zip(batches, fits, strict=True)
    )


@settings(max_examples=30)
@given(
    st.integers(0, 1000),
    st.integers(1, 6),
    st.none() | st.integers(1500, 4000),
    st.sampled_from(get_args(Packing)),
)
def test_what_is_reported_is_what_the_manager_will_plan(
    seed: int, max_graphs: int, most: int | None, packing: Packing
) -> None:
    requests = [*images(random.Random(seed), 12), request(500)]
    memory = LadderLimits(max_graphs, most, bytes_per_token=1, bytes_per_graph=100)
    tuning = tune_trace(requests, memory, packing=packing)
    assert tuning.config.packing == packing
    tuned = tuning.tuned.paths["default"]
    assert memory.allows(tuned.budgets[-1], len(tuned.budgets))
    for ladder in (tuned, tuning.baseline.paths["default"]):
        limits = Limits({"default": ladder.budgets}, tuning.config.max_items_per_batch, 0)
        model = CostModel({("default", ()): BatchCosts().of_ladder(ladder.budgets)})
        plans = [build_plan(r, limits, packing=packing, costs=model) for r in requests]
        batches = [batch.output_tokens for plan in plans for batch in plan.batches]
        assert ladder.cost == pytest.approx(planned_cost(ladder.budgets, batches, BatchCosts(), packing))
        hits = [p for plan in plans for batch in plan.batches for p in batch.paths.values() if p.budget]
        assert ladder.hit_fraction == pytest.approx(len(hits) / len(batches))
        replayed = sum(p.budget or 0 for p in hits)
        assert ladder.padding_fraction == pytest.approx(
            1 - sum(p.tokens for p in hits) / replayed if hits else 0.0
        )


def test_in_milliseconds_every_batch_costs_the_host_too() -> None:
    measured = {"default": MeasuredCosts(replay_ms={64: 1.0, 1024: 9.0}, exact_ms={64: 5.0}).curves()}
    tuned = tune_trace([request(100, 200, 400)] * 20, LadderLimits(2), costs=measured).tuned
    assert tuned.host_cost == pytest.approx(20 * HOST_MS_PER_BATCH), "a batch a request"
    assert tuned.cost == tuned.paths["default"].cost + tuned.host_cost


traces = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4)


def greedy_cost(
    ladder: tuple[int, ...], requests: Sequence[Request], max_items: int, costs: BatchCosts
) -> float:
    """Of the batches that the manager makes of the requests with this very ladder."""
    limits = Limits({"default": ladder}, max_items, 0)
    plans = [build_plan(traced, limits, packing="greedy") for traced in requests]
    batches = [batch.output_tokens for plan in plans for batch in plan.batches]
    return cost_of(ladder, batches, costs)


@pytest.mark.slow
@settings(max_examples=80)
@given(traces, st.integers(1, 3), cost_models, memories, st.none() | st.integers(10, 60))
def test_no_ladder_costs_less_for_the_batches_that_greedy_packing_makes_with_it(
    sizes: list[list[int]], max_graphs: int, costs: BatchCosts, memory: tuple[int, int], max_bytes: int | None
) -> None:
    """Also with a largest budget below the largest request, which is then cut, or below the largest item."""
    requests, max_items = [request(*tokens) for tokens in sizes], max(map(len, sizes))
    limits = limited(max_graphs, max_bytes, memory)
    smallest = max(max_items, min(map(min, sizes)))
    allowed = [
        ladder
        for ladder in ladders(max(smallest, *map(sum, sizes)), max_graphs)
        if ladder[0] >= max_items and ladder[-1] >= smallest and limits.allows(ladder[-1], len(ladder))
    ]
    if not allowed:
        return
    judged: list[Ladder] = []

    class RecordingJudge(Judge):
        def forecast(self, ladders: Mapping[str, Ladder]) -> Forecast:
            judged.append(ladders["default"])
            return super().forecast(ladders)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "Judge", RecordingJudge)
        tuned = tune_trace(requests, limits, costs={"default": costs}).tuned.paths["default"]
    assert tuned.budgets in allowed
    best = min(greedy_cost(ladder, requests, max_items, costs) for ladder in allowed)
    assert greedy_cost(judged[0], requests, max_items, costs) == pytest.approx(best)
    assert tuned.cost <= best * (1 + 1e-9), "the manager packs by cost, never worse than greedily"


def test_no_budget_is_smaller_than_the_items_of_a_batch() -> None:
    tuning = tune_trace([request(*[2] * 12), request(5), request(400)], LadderLimits(3))
    assert tuning.tuned.paths["default"].budgets == (12, 24, 400)
    assert tuning.config.max_items_per_batch == 12


NEARLY_EQUAL = BatchCosts(rising({1: 11.0, 1000: 1010.0}), rising({1: 201.0, 500: 520.0, 1000: 1025.0}))
"""At 500 tokens and more a replay gains less than 2 %."""


def test_only_budgets_that_will_be_captured_are_proposed() -> None:
    requests, costs = [request(tokens) for tokens in range(50, 1000, 50)], {"default": NEARLY_EQUAL}
    everything = LadderLimits(30, only_kept=False)
    tuned = tune_trace(requests, everything, costs=costs).tuned
    assert tuned.paths["default"].budgets[-1] > 900
    kept = tune_trace(requests, replace(everything, only_kept=True), costs=costs).tuned
    assert 400 < kept.paths["default"].budgets[-1] < 500
    for budget in kept.paths["default"].budgets:
        assert float(NEARLY_EQUAL.exact(budget)) > 1.02 * float(NEARLY_EQUAL.replay(budget))
    assert kept.cost < 1.02 * tuned.cost


def test_a_trace_that_no_capture_serves_faster_says_so() -> None:
    curve = rising({64: 1.0, 1024: 10.0})
    with pytest.raises(InputError, match=r"nothing to gain: of 1 sizes .* none would be captured"):
        tune_trace([request(100)], LadderLimits(2), costs={"default": BatchCosts(curve, curve)})


def test_advice_compares_with_the_default_ladder() -> None:
    odd = [request(tokens) for tokens in (64, 161, 321)] * 9
    gains = tune_trace(odd, LadderLimits(8))
    default = f"the default ladder ({len(default_budgets(64, 321))} graphs)"
    assert gains.gain >= 0.02
    assert gains.advice == f"Use it: predicted to cost {gains.gain:.1%} less than {default}."
    worse = tune_trace(odd, LadderLimits(1))
    assert worse.gain < -0.02
    assert worse.advice.startswith(f"Nothing to gain: {default} is predicted to cost less")
    same = tune_trace([request(64)] * 9 + [request(128)] * 9, LadderLimits(8))
    assert same.gain == 0
    as_much = "the default ladder (5 graphs) costs as much"
    assert same.advice == f"Nothing to gain but memory: {as_much}; the tuned one has 2."


def test_advice_compares_with_the_current_ladder() -> None:
    requests = [request(100)] * 9
    same = tune_trace(requests, LadderLimits(2), current={"default": (100,), "unused": (1,)})
    assert same.advice == "Nothing to gain: the current ladder (1 graphs) costs as much. Keep it."
    better = tune_trace(requests, LadderLimits(2), current={"default": (200,)})
    assert better.baseline.paths["default"].budgets == (200,)
    assert better.gain == pytest.approx(1 - 164 / 264)


def test_a_demand_takes_a_few_array_operations() -> None:
    demands = random.Random(0).sample(range(1, 16_000), 4000)
    found: list[list[tuple[float, Ladder]]] = []
    counts = [
        instructions(lambda count=count: found.append(by_length(demands[:count], BatchCosts(), 16)))
        for count in (1000, 4000)
    ]
    assert counts[0] < counts[1] < 4.1 * counts[0]
    assert counts[1] < 500 * 4000
    assert len(found[1]) == 16


def test_what_cannot_be_tuned_is_named() -> None:
    with pytest.raises(InputError, match=r"max_bytes: expected enough .*; got 1"):
        tune_trace([request(10)], LadderLimits(1, max_bytes=1))
    with pytest.raises(InputError, match="expected those of path 'default' too; got local"):
        tune_trace([request(10)], LadderLimits(1), costs={"local": BatchCosts()})
    with pytest.raises(InputError, match="at least one item that has output tokens"):
        tune_trace([request()], LadderLimits(1))


# --- curves of costs


def test_a_curve_is_straight_between_its_points() -> None:
    curve = rising({200: 4.0, 100: 2.0, 400: 5.0})
    np.testing.assert_allclose(curve([100, 150, 200, 300, 400]), [2, 3, 4, 4.5, 5])
    np.testing.assert_allclose(curve([0, 99]), 2)  # below the first point a replay costs its launches
    np.testing.assert_allclose(curve([600, 800]), [6, 7])  # the last slope goes on
    assert rising({100: 2.0})(5000) == 100.0  # a single point is taken in proportion


@given(
    st.dictionaries(st.integers(1, 5000), st.floats(0.01, 100), min_size=1, max_size=6),
    st.lists(st.integers(0, 10_000), min_size=2, max_size=20),
)
def test_more_tokens_never_cost_less(points: dict[int, float], tokens: list[int]) -> None:
    costs = rising(points)(sorted(tokens))
    assert (np.diff(costs) >= -1e-9 * costs[:-1]).all()


@given(
    st.dictionaries(st.integers(1, 8), st.integers(1, 9).map(float), min_size=1, max_size=5),
    st.lists(st.integers(1, 20), min_size=1, max_size=9),
)
def test_the_planner_prices_batches_by_the_same_curves(points: dict[int, float], tokens: list[int]) -> None:
    curve = rising(points)
    path_costs = BatchCosts(curve, curve).of_ladder(sorted(set(tokens)))
    for count in tokens:
        assert path_costs.replay[count] == pytest.approx(float(curve(count)))
        assert path_costs.exact_curve.at(count) == pytest.approx(float(curve(count)))


def test_budgets_are_kept_where_a_replay_gains() -> None:
    costs = BatchCosts(rising({100: 1.0, 200: 2.0}), rising({100: 2.0, 200: 2.04}))
    assert costs.keeps(np.array([50, 100, 150, 200])).tolist() == [True, True, True, False]
    measured = MeasuredCosts(replay_ms={100: 1.0, 200: 2.0}, exact_ms={100: 9.0}, not_kept_from=150)
    assert measured.curves().keeps(np.array([100, 150, 200])).tolist() == [True, False, False]
