from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.capture.reasons import MissReason
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.budgets import Limits
from fxsplit_encoder.manager.plan import PathPlan, Plan, build_fallback_plan, build_plan
from fxsplit_encoder.manager.protocol import EncoderItemSpec

LIMITS = Limits({"default": (64, 128, 256)}, max_items_per_batch=4, max_frames_per_batch=8)
TWO_PATHS = Limits({"global": (100, 200), "local": (50, 100)}, 8, 0)


def images(*tokens: int) -> list[EncoderItemSpec]:
    return [EncoderItemSpec(4 * count, count) for count in tokens]


def two_path_image(over_global: int, over_local: int) -> EncoderItemSpec:
    return EncoderItemSpec(1, over_global + over_local, {"global": over_global, "local": over_local})


def test_no_items_make_an_empty_plan() -> None:
    plan = build_plan([], LIMITS)
    assert plan == Plan((), 0)
    assert (plan.hits, plan.misses, plan.padding_fraction) == (0, {}, 0.0)
    assert str(plan) == "0 items in 0 batches: 0 hit; 0.0% padding"


def test_each_batch_gets_the_smallest_budget_with_room() -> None:
    plan = build_plan(images(100, 64, 20, 30), LIMITS)
    assert [batch.indices for batch in plan.batches] == [(2, 3, 1, 0)]
    assert plan.batches[0].paths == {"default": PathPlan(214, 256, None)}
    assert plan.batches[0].output_tokens == 214
    for tokens, budget in ((64, 64), (65, 128), (128, 128), (256, 256)):
        assert build_plan(images(tokens), LIMITS).batches[0].paths["default"].budget == budget


def test_an_item_over_the_largest_budget_is_a_miss_of_its_own() -> None:
    plan = build_plan(images(257, 10), LIMITS)
    assert [batch.indices for batch in plan.batches] == [(1,), (0,)]
    assert plan.batches[1].paths["default"] == PathPlan(257, None, MissReason.OVER_LARGEST_BUDGET)
    assert (plan.hits, plan.misses) == (1, {MissReason.OVER_LARGEST_BUDGET: 1})


def test_a_video_with_too_many_frames_is_a_miss_of_its_own() -> None:
    plan = build_plan(images(90, 10, 20), LIMITS, item_frames=[9, 8, 0])
    assert [(batch.indices, batch.reason) for batch in plan.batches] == [
        ((1, 2), None),
        ((0,), MissReason.TOO_MANY_FRAMES),
    ]
    images_only = Limits(LIMITS.path_budgets, 4, 0)
    assert build_plan(images(90, 10), images_only, item_frames=[1, 0]).misses == {
        MissReason.TOO_MANY_FRAMES: 1
    }


def test_a_dropped_budget_gives_way_to_the_next_larger() -> None:
    captured = {("default", 64), ("default", 256), ("other", 128)}
    assert build_plan(images(100), LIMITS, captured).batches[0].paths["default"].budget == 256


def test_items_are_packed_for_the_largest_budget_that_was_captured() -> None:
    plan = build_plan(images(60, 60, 60, 200), LIMITS, {("default", 64), ("default", 128)})
    assert [(batch.indices, batch.paths["default"].budget) for batch in plan.batches] == [
        ((0, 1), 128),
        ((2,), 64),
        ((3,), None),
    ]
    assert plan.misses == {MissReason.NOT_CAPTURED: 1}


def test_nothing_captured_is_a_counted_miss() -> None:
    plan = build_plan(images(60, 60, 300), LIMITS, captured=())
    assert plan.hits == 0
    assert plan.misses == {MissReason.NOT_CAPTURED: 2, MissReason.OVER_LARGEST_BUDGET: 1}


def test_paths_are_planned_independently() -> None:
    (batch,) = build_plan([two_path_image(80, 0), two_path_image(80, 60)], TWO_PATHS).batches
    assert batch.paths == {"global": PathPlan(160, 200), "local": PathPlan(60, 100)}

    (batch,) = build_plan([two_path_image(80, 0)], TWO_PATHS).batches
    assert batch.paths["local"] == PathPlan(0, None, None)
    assert (batch.reason, batch.paths["local"].result) == (None, "skipped")

    plan = build_plan([two_path_image(80, 101)], TWO_PATHS)
    assert plan.batches[0].paths["global"].budget == 100
    assert plan.batches[0].paths["local"].reason is MissReason.OVER_LARGEST_BUDGET
    assert (plan.hits, plan.misses) == (0, {MissReason.OVER_LARGEST_BUDGET: 1})


def test_a_path_without_captures_leaves_the_others_their_replays() -> None:
    plan = build_plan([two_path_image(80, 60)] * 2, TWO_PATHS, {("global", 200)})
    assert [batch.indices for batch in plan.batches] == [(0,), (1,)]
    assert [batch.paths["global"].budget for batch in plan.batches] == [200, 200]
    assert plan.misses == {MissReason.NOT_CAPTURED: 2}


def test_frames_must_match_the_items() -> None:
    with pytest.raises(InputError, match="one entry an item"):
        build_plan(images(1, 2), LIMITS, item_frames=[1])


def test_a_fallback_plan_keeps_the_items_together() -> None:
    plan = build_fallback_plan([two_path_image(80, 0)] * 3, ("global", "local"), MissReason.DISABLED)
    (batch,) = plan.batches
    assert (batch.indices, batch.output_tokens) == ((0, 1, 2), 240)
    assert batch.paths == {"global": PathPlan(240, None, MissReason.DISABLED), "local": PathPlan(0)}
    assert plan.misses == {MissReason.DISABLED: 3}
    assert build_fallback_plan([], ("global",), MissReason.DISABLED) == Plan((), 0)


def test_printing_shows_every_batch() -> None:
    plan = build_plan(images(48, *[4] * 12, 300), Limits({"default": (64, 128)}, 12, 0))
    summary, header, _, *rows = str(plan).splitlines()
    assert summary == "14 items in 3 batches: 13 hit, 1 over_largest_budget; 25.0% padding"
    assert header.split() == ["batch", "items", "path", "tokens", "budget", "padding", "%", "result"]
    assert [row.split() for row in rows] == [
        "0 1, 2, 3, 4, 5, 6, 7, 8 and 4 more default 48 64 25.0 hit".split(),
        "1 0 default 48 64 25.0 hit".split(),
        "2 13 default 300 - - over_largest_budget".split(),
    ]


path_tokens = st.tuples(st.integers(0, 250), st.integers(0, 120), st.integers(0, 6))


@given(st.lists(path_tokens, max_size=20), st.data())
def test_plans_replay_only_captured_budgets_with_room(
    items: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    limits = Limits(TWO_PATHS.path_budgets, data.draw(st.integers(1, 8)), data.draw(st.integers(0, 8)))
    every = [(path, budget) for path, budgets in limits.path_budgets.items() for budget in budgets]
    captured = data.draw(st.sets(st.sampled_from(every)))
    frames = [count for _, _, count in items]
    specs = [two_path_image(a, b) for a, b, _ in items]
    plan = build_plan(specs, limits, captured, frames)

    assert Counter(i for batch in plan.batches for i in batch.indices) == Counter(range(len(items)))
    assert plan.hits + sum(plan.misses.values()) == plan.num_items == len(items)
    for batch in plan.batches:
        assert len(batch.indices) <= limits.max_items_per_batch
        assert batch.output_tokens == sum(specs[i].output_tokens for i in batch.indices)
        batch_frames = sum(frames[i] for i in batch.indices)
        for path, planned in batch.paths.items():
            assert planned.tokens == sum(specs[i].get_path_output_tokens(path) for i in batch.indices)
            ready = sorted(b for p, b in captured if p == path and b >= planned.tokens)
            if planned.tokens == 0:
                assert planned == PathPlan(0)
            elif batch_frames > limits.max_frames_per_batch or not ready:
                assert planned.budget is None
                assert planned.reason is not None
            else:
                assert (planned.budget, planned.reason) == (ready[0], None)
