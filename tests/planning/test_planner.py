from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.config import Packing
from fxsplit_encoder.planning.costs import CostModel, PathCosts
from fxsplit_encoder.planning.limits import CaptureKey, Limits
from fxsplit_encoder.planning.plan import Item, MissReason, PathPlan, Plan, PlannedBatch
from fxsplit_encoder.planning.planner import build_plan
from fxsplit_encoder.protocol import EncoderItemSpec

from ..instructions import instructions
from .test_packing import H200

LIMITS = Limits({"default": (64, 128, 256)}, max_items_per_batch=4, max_frames_per_batch=8)
TWO_PATHS = Limits({"global": (100, 200), "local": (50, 100)}, 8, 0, frozenset({"local"}))
OVER = MissReason.OVER_LARGEST_BUDGET

H200_LIMITS = Limits({"default": (64, 256, 1024, 1764)}, 64, 8)

each_packing = pytest.mark.parametrize("packing", get_args(Packing))


def image(tokens: int, **facts: Any) -> Item:
    return Item(EncoderItemSpec(4 * tokens, tokens), **facts)


def images(*tokens: int) -> list[Item]:
    return list(map(image, tokens))


def two_path_image(over_global: int, over_local: int, **facts: Any) -> Item:
    tokens = {"global": over_global, "local": over_local}
    return Item(EncoderItemSpec(1, over_global + over_local, tokens), **facts)


def captured(*budgets: int, not_needed: tuple[int, ...] = ()) -> CostModel:
    return model(replace(PathCosts.unmeasured(budgets), not_needed=not_needed))


def model(path_costs: PathCosts, per_batch: float = 0.15) -> CostModel:
    return CostModel({("default", ()): path_costs}, per_batch)


def results(plan: Plan) -> list[tuple[tuple[int, ...], int | None, str]]:
    """(items, budget, result) of the single path of every batch."""
    return [(b.indices, p.budget, p.result) for b in plan.batches for p in b.paths.values()]


CASES: dict[str, tuple[list[Item], CostModel | None, list[Any]]] = {
    "over the largest budget": (
        images(10, 257),
        None,
        [((0,), 64, "hit"), ((1,), None, "over_largest_budget")],
    ),
    "too many frames": (
        [image(10, frames=8), image(20), image(90, frames=9)],
        None,
        [((0, 1), 64, "hit"), ((2,), None, "too_many_frames")],
    ),
    "a budget was dropped": (
        images(100),
        CostModel({**captured(64, 256).paths, ("other", ()): PathCosts({128: 1.0})}),
        [((0,), 256, "hit")],
    ),
    "nothing was captured": (
        images(60, 60, 300),
        captured(),
        [((0, 1), None, "not_captured"), ((2,), None, "over_largest_budget")],
    ),
    "exact is as fast": (
        images(100),
        captured(64, 256, not_needed=(128,)),
        [((0,), None, "exact_is_faster")],
    ),
    "a smaller exact shape is": (images(200), captured(64, 256, not_needed=(128,)), [((0,), 256, "hit")]),
}


@each_packing
@pytest.mark.parametrize("case", CASES)
def test_the_smallest_captured_budget_with_room_is_replayed(case: str, packing: Packing) -> None:
    items, ready, expected = CASES[case]
    assert results(build_plan(items, LIMITS, packing, ready)) == expected


@pytest.mark.parametrize(
    ("packing", "sizes", "budgets", "expected"),
    [
        ("greedy", (100, 60), (64, 128, 512), [((1, 0), 512, "hit")]),
        ("cost", (100, 60), (64, 128, 512), [((0,), 128, "hit"), ((1,), 64, "hit")]),
        ("cost", (64, 128, 64), (64, 128, 256), [((0, 1, 2), 256, "hit")]),
        ("greedy", (60, 130), (64, 140, 256), [((0, 1), 256, "hit")]),
        ("greedy_defer", (60, 130), (64, 140, 256), [((0,), 64, "hit"), ((1,), 140, "hit")]),
    ],
)
def test_each_packing_is_a_choice(packing: Packing, sizes: Any, budgets: Any, expected: Any) -> None:
    limits = Limits({"default": budgets}, 4, 0)
    assert results(build_plan(images(*sizes), limits, packing=packing)) == expected


@each_packing
def test_more_segments_than_a_capture_holds_need_a_larger_one(packing: Packing) -> None:
    costs = model(PathCosts.unmeasured((64, 128, 256), {64: 2, 128: 4, 256: 6}))

    def budget(segments: int) -> tuple[int | None, str]:
        plan = build_plan([image(10, segments=segments)], LIMITS, packing=packing, costs=costs)
        return results(plan)[0][1:]

    assert [budget(n) for n in (2, 3, 6)] == [(64, "hit"), (128, "hit"), (256, "hit")]
    assert budget(7) == (None, "too_many_segments")
    items = [image(10, segments=segments) for segments in (3, 3, 1)]
    assert build_plan(items, LIMITS, packing=packing, costs=costs).misses == {}


def test_a_path_over_its_budgets_may_run_eagerly() -> None:
    costs = CostModel(
        {
            ("global", ()): PathCosts({100: 1.0, 200: 2.0}, exact=((100, 5.0),), eager=((100, 4.0),)),
            ("local", ()): PathCosts({50: 1.0, 100: 1.5}, exact=((100, 5.0),)),
        },
        0.5,
    )
    (batch,) = build_plan([two_path_image(400, 60)], TWO_PATHS, costs=costs).batches
    assert batch.paths == {
        "global": PathPlan(400, None, OVER, True, 16.0),
        "local": PathPlan(60, 100, milliseconds=1.5),
    }
    assert batch.milliseconds == 18.0


def test_costs_are_those_of_the_axis_keys() -> None:
    exact = {1: 9.0, 2: 0.5}
    costs = CostModel({("default", (k,)): PathCosts({64: 1.0}, exact=((64, ms),)) for k, ms in exact.items()})
    plan = build_plan([image(30, axis_keys=(key,)) for key in exact], LIMITS, costs=costs)
    assert results(plan) == [((0,), 64, "hit"), ((1,), None, "exact_is_faster")]


def test_items_with_a_reason_fall_back_apart_by_reason() -> None:
    unsupported, disabled = MissReason.UNSUPPORTED_INPUT, MissReason.DISABLED
    reasons = [unsupported, None, disabled, *[unsupported] * 5, None]
    items = [image(tokens, refusal=reason) for tokens, reason in enumerate(reasons, start=10)]
    plan = build_plan(items, LIMITS)
    assert results(plan) == [
        ((0, 3, 4, 5), None, "unsupported_input"),
        ((6, 7), None, "unsupported_input"),
        ((1, 8), 64, "hit"),
        ((2,), None, "disabled"),
    ]


@pytest.mark.parametrize(
    ("skippable", "local"),
    [(("global", "local"), PathPlan(0)), (("global",), PathPlan(0, None, MissReason.DISABLED))],
)
def test_refused_items_skip_a_path_without_tokens(skippable: Any, local: PathPlan) -> None:
    items = [two_path_image(80, 0, refusal=MissReason.DISABLED)] * 3
    plan = build_plan(items, Limits({"global": (), "local": ()}, 3, 0, frozenset(skippable)))
    (batch,) = plan.batches
    assert (batch.indices, batch.output_tokens) == ((0, 1, 2), 240)
    assert batch.paths == {"global": PathPlan(240, None, MissReason.DISABLED), "local": local}
    assert plan.misses == {MissReason.DISABLED: 3}
    assert build_plan([], LIMITS) == Plan((), 0)


def test_vllm_52229_the_cheapest_way_is_taken_and_its_time_predicted() -> None:
    plan = build_plan(images(200), H200_LIMITS, costs=model(H200))
    assert plan.batches == (
        PlannedBatch((0,), {"default": PathPlan(200, 256, milliseconds=3.47)}, 200, (), 3.62),
    )
    plan = build_plan(images(1700), H200_LIMITS, costs=model(H200))
    (planned,) = plan.batches[0].paths.values()
    assert (planned.budget, planned.reason, planned.eager) == (None, MissReason.EXACT_IS_FASTER, False)
    assert plan.milliseconds == pytest.approx(0.15 + 4.5 + (1700 - 268) * 25.1 / 1496)

    eager = PathCosts(H200.replay, exact=H200.exact, eager=((1764, 9.0),))
    (planned,) = build_plan(images(1700), H200_LIMITS, costs=model(eager)).batches[0].paths.values()
    assert (planned.reason, planned.eager) == (MissReason.EAGER_IS_FASTER, True)


def test_an_exact_budget_is_named_even_if_nothing_else_was_captured() -> None:
    for not_needed, result in (((1764,), "exact_is_faster"), ((), "not_captured")):
        path_costs = PathCosts({64: 1.72}, exact=H200.exact, not_needed=not_needed)
        plan = build_plan(images(1500), H200_LIMITS, costs=model(path_costs))
        assert results(plan) == [((0,), None, result)]


def test_attention_is_predicted_and_decides_nothing() -> None:
    path_costs = PathCosts(H200.replay, exact=H200.exact, attention=1e-6)
    video = [image(200, segments=2), image(100)]
    plain = build_plan(video, H200_LIMITS, costs=model(H200))
    plan = build_plan(video, H200_LIMITS, costs=model(path_costs))
    assert results(plan) == results(plain)
    assert plain.milliseconds is not None
    assert plan.milliseconds == pytest.approx(plain.milliseconds + 1e-6 * (2 * 400**2 + 400**2))


def test_times_that_nobody_measured_are_not_shown() -> None:
    for costs in (None, model(PathCosts.unmeasured((64, 128, 256)))):
        plan = build_plan(images(10), LIMITS, costs=costs)
        assert (plan.milliseconds, plan.batches[0].paths["default"].milliseconds) == (None, None)
    plan = build_plan(images(10, 1800), H200_LIMITS, costs=model(PathCosts(H200.replay)))
    assert [batch.milliseconds for batch in plan.batches] == [pytest.approx(1.87), None]


@pytest.mark.parametrize(("num_items", "most"), [(1, 1500), (10, 5000), (32, 10_000), (256, 60_000)])
def test_planning_takes_few_instructions(num_items: int, most: int) -> None:
    generator = random.Random(0)
    items = images(*(generator.randint(4, 600) for _ in range(num_items)))
    budgets = H200_LIMITS.path_budgets["default"]
    costs = model(PathCosts(H200.replay, exact=H200.exact, max_segments=dict.fromkeys(budgets, 64)))

    def plan() -> None:
        build_plan(items, H200_LIMITS, costs=costs)

    plan()
    assert instructions(plan) < most


@pytest.mark.parametrize("packing", get_args(Packing))
@pytest.mark.parametrize("measured", [True, False])
def test_batches_are_as_large_as_captures_hold(packing: Packing, measured: bool) -> None:
    """Of 16 tokens a tile, and four tiles at most, at any budget."""
    limits = Limits({"default": (32, 64, 128, 256)}, 4, 0)
    prices = {32: 1.0, 64: 1.5, 128: 1.6, 256: 1.7}
    own = PathCosts(prices, exact=((1, 3.0), (300, 9.0))) if measured else PathCosts.unmeasured(prices)
    costs = model(replace(own, max_tokens={128: 64, 256: 64}))
    plan = build_plan(images(48, 32, 16, 32), limits, packing=packing, costs=costs)
    assert plan.hits == 4
    assert all(batch.paths["default"].tokens <= 64 for batch in plan.batches)
    single = build_plan(images(96), limits, packing=packing, costs=costs)
    assert single.misses == {MissReason.EXTENT_EXCEEDED: 1}


path_tokens = st.tuples(
    st.integers(0, 250), st.integers(0, 120), st.integers(0, 6), st.integers(1, 4), st.sampled_from("ab")
)


@settings(max_examples=60)
@given(st.lists(path_tokens, max_size=16), st.sampled_from(get_args(Packing)), st.booleans(), st.data())
def test_every_item_is_planned_once_and_every_limit_kept(
    items: list[tuple[int, int, int, int, str]], packing: Packing, measured: bool, data: st.DataObject
) -> None:
    limits = Limits(
        TWO_PATHS.path_budgets,
        data.draw(st.integers(1, 8)),
        data.draw(st.integers(0, 8)),
        frozenset({"local"}),
    )
    every = [
        CaptureKey(path, budget, (axis,))
        for axis in "ab"
        for path, budgets in limits.path_budgets.items()
        for budget in budgets
    ]
    replayed = data.draw(st.sets(st.sampled_from(every)))
    max_segments = data.draw(st.dictionaries(st.sampled_from(every), st.integers(1, 9)))
    max_tokens = data.draw(st.dictionaries(st.sampled_from(every), st.integers(1, 250)))
    reasons = [data.draw(st.sampled_from([None, None, MissReason.UNSUPPORTED_INPUT])) for _ in items]
    drawn = [
        two_path_image(a, b, frames=frames, segments=segments, axis_keys=(axis,), refusal=reason)
        for (a, b, frames, segments, axis), reason in zip(items, reasons, strict=True)
    ]
    costs_of_paths = {}
    for axis, (path, budgets) in itertools.product("ab", limits.path_budgets.items()):
        held_segments, held_tokens = (
            {b: held[key] for b in budgets if (key := CaptureKey(path, b, (axis,))) in held}
            for held in (max_segments, max_tokens)
        )
        ready = [budget for budget in budgets if CaptureKey(path, budget, (axis,)) in replayed]
        prices = PathCosts({b: 1 + b / 50 for b in ready}, exact=((1, 3.0), (300, 9.0)))
        costs = prices if measured else PathCosts.unmeasured(ready)
        costs_of_paths[path, (axis,)] = replace(costs, max_segments=held_segments, max_tokens=held_tokens)
    plan = build_plan(drawn, limits, packing, CostModel(costs_of_paths, 0.1))

    assert Counter(i for batch in plan.batches for i in batch.indices) == Counter(range(len(items)))
    assert plan.hits + sum(plan.misses.values()) == plan.num_items == len(items)
    for batch in plan.batches:
        assert len(batch.indices) <= limits.max_items_per_batch
        assert batch.output_tokens == sum(drawn[i].spec.output_tokens for i in batch.indices)
        assert {drawn[i].axis_keys for i in batch.indices} == {batch.axis_keys}
        assert len({reasons[i] for i in batch.indices}) == 1
        for path, planned in batch.paths.items():
            counts = [drawn[i].spec.get_path_output_tokens(path) for i in batch.indices]
            assert planned.tokens == sum(counts)
            if reasons[batch.indices[0]] is not None:
                assert planned.reason is MissReason.UNSUPPORTED_INPUT or planned.skipped
                continue
            assert len(counts) == 1 or planned.tokens <= limits.path_budgets[path][-1]
            assert planned.skipped == (planned.tokens == 0 and path == "local")
            assert (planned.budget is None) == (planned.reason is not None or planned.skipped)
            if planned.budget is not None:
                key = CaptureKey(path, planned.budget, batch.axis_keys)
                assert planned.tokens <= min(planned.budget, max_tokens.get(key, planned.budget))
                assert key in replayed
                assert sum(drawn[i].frames for i in batch.indices) <= limits.max_frames_per_batch
                assert sum(drawn[i].segments for i in batch.indices) <= max_segments.get(key, 99)


# --- what a tower's own forward does better than replays

# 16 ms of the host, or 0.01 ms a token, whatever takes longer; a replay takes as long as the device.
BUDGETS = (256, 512, 1024, 2048)
COSTS = PathCosts(
    {budget: 1.0 + budget / 100 for budget in BUDGETS},
    eager=((256, 16.0), (1024, 16.0), (1600, 16.0), (2048, 21.0), (4096, 41.0)),
)
EAGER_LIMITS = Limits({"default": (*BUDGETS, 4096)}, max_items_per_batch=8, max_frames_per_batch=0)


def plan_eagerly(*tokens: int, costs: PathCosts = COSTS) -> Plan:
    limits = replace(EAGER_LIMITS, path_budgets={"default": tuple(costs.replay)})
    return build_plan(images(*tokens), limits, costs=model(costs, 0.3))


@pytest.mark.parametrize(("items", "size", "slower"), [(20, 90, None), (9, 200, None), (20, 90, 1.1)])
def test_more_items_than_captures_hold_run_eagerly_where_that_is_quicker(
    items: int, size: int, slower: float | None
) -> None:
    """Also of a compiled tower, whose exact shape keeps to the items of captures."""
    exact = tuple((tokens, cost * slower) for tokens, cost in COSTS.eager) if slower else ()
    costs = replace(COSTS, replay={**COSTS.replay, 4096: 41.96}, exact=exact)
    made = plan_eagerly(*[size] * items, costs=costs)
    assert made.misses == {MissReason.EAGER_IS_FASTER: items}
    (batch,) = made.batches
    assert batch.paths["default"].eager
    assert made.milliseconds == pytest.approx(0.3 + 16.0 + (1800 - 1600) * 5 / 448)


def test_few_items_are_replayed_where_that_is_quicker() -> None:
    made = plan_eagerly(*[60] * 16)
    assert made.hits == 16
    assert [len(batch.indices) for batch in made.batches] == [8, 8]


@pytest.mark.parametrize("items", [9, 20])
def test_a_program_at_its_exact_shape_keeps_to_the_items_of_captures(items: int) -> None:
    fast = tuple((tokens, cost / 10) for tokens, cost in COSTS.eager)
    made = plan_eagerly(*[90] * items, costs=replace(COSTS, exact=fast))
    assert max(len(batch.indices) for batch in made.batches) <= 8
    assert made.misses == {MissReason.EXACT_IS_FASTER: items}


def test_the_own_forward_takes_no_more_than_it_was_measured_with() -> None:
    costs = replace(COSTS, replay={**COSTS.replay, 4096: 80.0})
    assert len(plan_eagerly(*[90] * 40, costs=costs).batches) == 1
    measured = tuple(point for point in COSTS.eager if point[0] <= 2048)
    made = plan_eagerly(*[90] * 40, costs=replace(costs, eager=measured))
    assert max(batch.output_tokens for batch in made.batches) <= 2048
