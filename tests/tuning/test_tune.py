import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.config import Packing
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH, CostModel
from fxsplit_encoder.planning.limits import Limits, default_budgets
from fxsplit_encoder.planning.planner import build_plan
from fxsplit_encoder.tuning import tune
from fxsplit_encoder.tuning.costs import BatchCosts, MemoryModel, RisingCurve
from fxsplit_encoder.tuning.search import LadderLimits, candidate_budgets
from fxsplit_encoder.tuning.trace import Request, trace_demands
from fxsplit_encoder.tuning.tune import Judge, LadderForecast, Tuning, forecast, tune_budgets, tune_trace

from ..instructions import instructions
from .test_recording import request, two_path_request

LARGEST = 9
demand_lists = st.lists(st.integers(1, LARGEST), min_size=1, max_size=8)
# Small costs, so that every choice matters: a budget or the exact shape, one budget more or less.
curves = st.builds(RisingCurve.linear, st.integers(1, 6).map(float)) | st.builds(
    RisingCurve.from_mapping,
    st.dictionaries(st.integers(0, LARGEST), st.integers(1, 9).map(float), min_size=1, max_size=4),
)
cost_models = st.builds(BatchCosts, curves, curves)
memories = st.builds(MemoryModel, st.integers(1, 3), st.integers(0, 3))


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


@settings(max_examples=80)
@given(demand_lists, st.integers(1, 4), cost_models, memories, st.none() | st.integers(1, 40))
def test_no_ladder_of_any_sizes_within_the_memory_costs_less(
    demands: list[int], max_graphs: int, costs: BatchCosts, memory: MemoryModel, max_bytes: int | None
) -> None:
    allowed = [
        ladder
        for ladder in ladders(max(demands), max_graphs)
        if max_bytes is None
        or (memory.num_bytes(ladder[-1], len(ladder)) <= max_bytes and ladder[-1] >= min(demands))
    ]
    limits = LadderLimits(max_graphs, max_bytes=max_bytes, memory=memory, only_kept=False)
    if not allowed:
        with pytest.raises(InputError, match="max_bytes: expected enough"):
            tune_budgets({"default": demands}, limits, costs=costs)
        return
    tuned = tune_budgets({"default": demands}, limits, costs=costs).paths["default"].tuned
    assert tuned.budgets in allowed
    assert tuned.cost == pytest.approx(cost_of(tuned.budgets, demands, costs))
    assert tuned.cost == pytest.approx(min(cost_of(ladder, demands, costs) for ladder in allowed))


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
    memory: MemoryModel,
    max_bytes: int,
) -> None:
    candidates = [ladders(max(demands), 2) for demands in (first, second)]
    allowed = [
        (a, b)
        for a, b in itertools.product(*candidates)
        if memory.num_bytes(max(a[-1], b[-1]), len(a) + len(b)) <= max_bytes
        and a[-1] >= min(first)
        and b[-1] >= min(second)
    ]
    if not allowed:
        return
    tuning = tune_budgets(
        {"a": first, "b": second},
        LadderLimits(2, max_bytes=max_bytes, memory=memory, only_kept=False),
        costs={"a": first_costs, "b": second_costs},
    )
    a, b = (tuning.paths[name].tuned.budgets for name in ("a", "b"))
    assert memory.num_bytes(max(a[-1], b[-1]), len(a) + len(b)) <= max_bytes
    best = min(cost_of(a, first, first_costs) + cost_of(b, second, second_costs) for a, b in allowed)
    assert tuning.cost == pytest.approx(best)


@given(demand_lists, st.integers(1, 4), st.integers(1, LARGEST), st.integers(1, LARGEST))
def test_candidates_keep_to_granularity_and_bounds(
    demands: list[int], granularity: int, minimum: int, maximum: int
) -> None:
    low, high = min(minimum, maximum), max(minimum, maximum)
    candidates = candidate_budgets(demands, low, high, granularity).tolist()
    assert candidates == sorted(set(candidates))
    assert all(low <= n <= high and (n % granularity == 0 or n in (low, high)) for n in candidates)
    for tokens in demands:
        assert tokens > high or any(n >= tokens for n in candidates)


def test_a_forecast_is_what_the_definition_says() -> None:
    demands = [100, 50, 101, 250, 1000]
    costs = BatchCosts(RisingCurve.linear(64), RisingCurve.linear(160))
    ladder = forecast((100, 200, 500), demands, costs)
    # 50 costs 164 either way and is replayed; 250 costs less at its exact shape; 1000 has no budget.
    assert ladder.cost == cost_of(ladder.budgets, demands, costs) == 164 + 164 + 261 + 410 + 1160
    assert ladder.hit_fraction == 2 / 5
    assert ladder.padding_fraction == 50 / 200


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
    st.integers(600, 6000),
    st.none() | st.integers(1500, 4000),
    st.sampled_from(get_args(Packing)),
)
def test_what_is_reported_is_what_the_manager_will_plan(
    seed: int, max_graphs: int, maximum: int, most: int | None, packing: Packing
) -> None:
    requests = [*images(random.Random(seed), 12), request(500)]
    memory = MemoryModel(bytes_per_token=1, bytes_per_graph=100)
    tuning = tune_trace(
        requests,
        LadderLimits(max_graphs, maximum=maximum, max_bytes=most, granularity=8, memory=memory),
        packing=packing,
    )
    assert tuning.to_config().packing == packing
    path = tuning.paths["default"]
    if most is not None:
        assert memory.num_bytes(path.tuned.budgets[-1], len(path.tuned.budgets)) <= most
    for ladder in (path.tuned, path.baseline):
        limits = Limits({"default": ladder.budgets}, tuning.max_items_per_batch, 0)
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
    measured = BatchCosts.measured({64: 1.0, 1024: 9.0}, {64: 5.0})
    tuning = tune_trace([request(100, 200, 400)] * 20, LadderLimits(2), costs=measured)
    assert tuning.host_cost == pytest.approx(20 * HOST_MS_PER_BATCH), "a batch a request"
    assert tuning.cost == tuning.paths["default"].tuned.cost + tuning.host_cost


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
@given(traces, st.integers(1, 3), st.integers(1, 4), cost_models, memories, st.none() | st.integers(10, 60))
def test_no_ladder_costs_less_for_the_batches_that_greedy_packing_makes_with_it(
    sizes: list[list[int]],
    max_graphs: int,
    max_items: int,
    costs: BatchCosts,
    memory: MemoryModel,
    max_bytes: int | None,
) -> None:
    """Also with a largest budget below the largest request, which is then cut, or below the largest item."""
    requests = [request(*tokens) for tokens in sizes]
    smallest = max(max_items, min(map(min, sizes)))
    largest = max(smallest, *map(sum, sizes))
    allowed = [
        ladder
        for ladder in ladders(largest, max_graphs)
        if ladder[0] >= max_items
        and ladder[-1] >= smallest
        and (max_bytes is None or memory.num_bytes(ladder[-1], len(ladder)) <= max_bytes)
    ]
    if not allowed:
        return
    judged: list[tuple[int, ...]] = []

    class RecordingJudge(Judge):
        def forecast(self, ladders: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, LadderForecast], float]:
            judged.append(ladders["default"])
            return super().forecast(ladders)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "Judge", RecordingJudge)
        tuned = tune_trace(
            requests,
            LadderLimits(max_graphs, max_bytes=max_bytes, maximum=largest, memory=memory, only_kept=False),
            max_items_per_batch=max_items,
            costs=costs,
        ).paths["default"]
    assert tuned.tuned.budgets in allowed
    best = min(greedy_cost(ladder, requests, max_items, costs) for ladder in allowed)
    assert greedy_cost(judged[0], requests, max_items, costs) == pytest.approx(best)
    assert tuned.tuned.cost <= best * (1 + 1e-9), "the manager packs by cost, never worse than greedily"


def test_no_budget_is_smaller_than_the_items_of_a_batch() -> None:
    requests = [request(*[2] * 12), request(5), request(400)]
    tuning = tune_trace(requests, LadderLimits(3))
    assert tuning.paths["default"].tuned.budgets == (12, 24, 400)
    assert tuning.to_config().max_items_per_batch == 12
    fewer = tune_trace(requests, LadderLimits(3), max_items_per_batch=4)
    assert fewer.paths["default"].tuned.budgets == (5, 8, 400)
    assert fewer.to_config().max_items_per_batch == 4


def test_every_path_gets_a_ladder() -> None:
    requests = [
        two_path_request((272, 100)),
        two_path_request((272, 300), (272, 0)),
        two_path_request((272, 0)),
    ]
    tuning = tune_trace(requests, LadderLimits(2))
    assert {name: path.tuned.budgets for name, path in tuning.paths.items()} == {
        "global": (272, 544),
        "local": (100, 300),
    }
    config = tuning.to_config()
    assert config.token_budgets == ()
    assert {name: path.token_budgets for name, path in config.paths.items()} == {
        "global": (272, 544),
        "local": (100, 300),
    }
    # Each as if it were alone.
    for path, demands in trace_demands(requests, maximum=544, max_items_per_batch=2).items():
        assert tuning.paths[path] == tune_budgets({path: demands}, LadderLimits(2), minimum=2).paths[path]


def test_the_settings_hold_the_limits() -> None:
    tuning = tune_trace([request(100, 50), request(400)], LadderLimits(2, max_bytes=2**30))
    config = tuning.to_config()
    assert (config.token_budgets, config.max_items_per_batch) == ((150, 400), 2)
    assert config.max_graph_bytes == 2**30
    assert tune_budgets({"default": [5]}, LadderLimits(1)).to_config().model_fields_set == {"token_budgets"}


def test_printing_shows_both_ladders() -> None:
    measured = BatchCosts.measured({64: 1.0, 1024: 10.6}, {64: 6.0, 1024: 15.6})
    tuning = tune_budgets({"default": [100, 300, 1000]}, LadderLimits(2), costs=measured)
    title, header, _, tuned, default, *_ = str(tuning).splitlines()
    assert title == "Predicted cost of all batches in ms, and its ratio to that of the default ladder:"
    assert header.split() == "path ladder budgets graphs padding % hit % cost ratio".split()
    assert tuned.split()[:8] == "default tuned 300, 1000 2 12.5 100.0 17.1".split()
    assert default.split()[:7] == "default default 100, 125, 150, 175, 200,".split()
    assert default.split()[7:] == "14 0.0 100.0 15.1 1.000".split()


# --- whether it is worth it


NEARLY_EQUAL = BatchCosts(
    RisingCurve(((0, 10.0), (1000, 1010.0))), RisingCurve(((0, 200.0), (500, 520.0), (1000, 1025.0)))
)
"""At 500 tokens and more a replay gains less than 2 %."""


@pytest.mark.parametrize("granularity", [1, 16])
def test_only_budgets_that_will_be_captured_are_proposed(granularity: int) -> None:
    requests = [request(tokens) for tokens in range(50, 1000, 50)]
    everything = LadderLimits(30, granularity=granularity, only_kept=False)
    tuned = tune_trace(requests, everything, costs=NEARLY_EQUAL).paths["default"].tuned
    assert tuned.budgets[-1] > 900
    kept = tune_trace(requests, replace(everything, only_kept=True), costs=NEARLY_EQUAL).paths["default"]
    assert 400 < kept.tuned.budgets[-1] < 500
    for budget in kept.tuned.budgets:
        assert float(NEARLY_EQUAL.exact(budget)) > 1.02 * float(NEARLY_EQUAL.replay(budget))
    assert kept.tuned.cost < 1.02 * tuned.cost


def test_a_trace_that_no_capture_serves_faster_says_so() -> None:
    costs = BatchCosts.measured({64: 1.0, 1024: 10.0}, {64: 1.0, 1024: 10.0})
    with pytest.raises(InputError, match=r"nothing to gain: of 1 sizes .* none would be captured"):
        tune_trace([request(100)], LadderLimits(2), costs=costs)


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
    same = tune_trace(requests, LadderLimits(2), current={"default": (100,)})
    assert same.advice == "Nothing to gain: the current ladder (1 graphs) costs as much. Keep it."
    better = tune_trace(requests, LadderLimits(2), current={"default": (200,)})
    assert better.paths["default"].baseline.budgets == (200,)
    assert better.gain == pytest.approx(1 - 164 / 264)
    assert "default  current         200" in str(better)


def test_a_demand_takes_a_few_array_operations() -> None:
    demands = random.Random(0).sample(range(1, 16_000), 4000)
    tunings: list[Tuning] = []
    counts = [
        instructions(
            lambda count=count: tunings.append(
                tune_budgets({"default": demands[:count]}, LadderLimits(16, max_bytes=2**40))
            )
        )
        for count in (1000, 4000)
    ]
    assert counts[0] < counts[1] < 4.1 * counts[0]
    assert counts[1] < 500 * 4000
    assert len(tunings[1].paths["default"].tuned.budgets) == 16


def test_wrong_arguments_are_named() -> None:
    demands = {"default": [10]}
    with pytest.raises(InputError, match="max_graphs: expected at least 1; got 0"):
        tune_budgets(demands, LadderLimits(0))
    with pytest.raises(InputError, match="granularity: expected at least 1; got 0"):
        tune_trace([request(10)], LadderLimits(1, granularity=0))
    with pytest.raises(InputError, match="expected those of one path or more"):
        tune_budgets({}, LadderLimits(1))
    for bad in ([], [0, 10]):
        with pytest.raises(InputError, match=r"path 'default': expected one or more, all above 0"):
            tune_budgets({"default": bad}, LadderLimits(1))
    with pytest.raises(InputError, match=r"maximum: expected at least 10 output tokens .* got 9"):
        tune_budgets(demands, LadderLimits(1, maximum=9))
    with pytest.raises(InputError, match=r"maximum: expected at least 10 output tokens.* got 9"):
        tune_trace([request(10)], LadderLimits(1, maximum=9, max_bytes=2**40))
    with pytest.raises(InputError, match=r"max_bytes: expected enough .*; got 1"):
        tune_trace([request(10)], LadderLimits(1, max_bytes=1))
    with pytest.raises(InputError, match="expected those of path 'default' too; got local"):
        tune_budgets(demands, LadderLimits(1), costs={"local": BatchCosts()})
    mixed = {"a": BatchCosts(), "b": BatchCosts.measured({1: 1.0}, {1: 1.0})}
    with pytest.raises(InputError, match="one unit for all paths"):
        tune_budgets({"a": [1], "b": [1]}, LadderLimits(1), costs=mixed)
    with pytest.raises(InputError, match="at least one item that has output tokens"):
        tune_trace([request()], LadderLimits(1))
