"""What a tower's own forward does better than replays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxsplit_encoder.planning.costs import CostModel, PathCosts
from fxsplit_encoder.planning.items import Item
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.planning.plan import MissReason, Plan
from fxsplit_encoder.planning.planner import build_plan
from fxsplit_encoder.protocol import EncoderItemSpec

# 16 ms of the host, or 0.01 ms a token, whatever takes longer; a replay takes as long as the device.
BUDGETS = (256, 512, 1024, 2048)
COSTS = PathCosts(
    {budget: 1.0 + budget / 100 for budget in BUDGETS},
    eager=((256, 16.0), (1024, 16.0), (1600, 16.0), (2048, 21.0), (4096, 41.0)),
)
LIMITS = Limits({"default": (*BUDGETS, 4096)}, max_items_per_batch=8, max_frames_per_batch=0)


def plan(*tokens: int, costs: PathCosts = COSTS, per_batch: float = 0.3, packing: str = "cost") -> Plan:
    items = [Item(EncoderItemSpec(4 * count, count)) for count in tokens]
    model = CostModel({("default", ()): costs}, per_batch)
    limits = replace(LIMITS, path_budgets={"default": tuple(costs.replay)})
    return build_plan(items, limits, packing=packing, costs=model)  # type: ignore[arg-type]


@pytest.mark.parametrize(("items", "size"), [(20, 90), (10, 180), (9, 200)])
def test_more_items_than_captures_hold_run_eagerly_where_that_is_quicker(items: int, size: int) -> None:
    costs = replace(COSTS, replay={**COSTS.replay, 4096: 41.96})
    made = plan(*[size] * items, costs=costs)
    assert made.misses == {MissReason.EAGER_IS_FASTER: items}
    (batch,) = made.batches
    assert batch.paths["default"].eager
    assert made.milliseconds == pytest.approx(0.3 + 16.0 + (1800 - 1600) * 5 / 448)


def test_few_items_are_replayed_where_that_is_quicker() -> None:
    made = plan(*[60] * 16)
    assert made.hits == 16
    assert [len(batch.indices) for batch in made.batches] == [8, 8]


def test_a_program_at_its_exact_shape_keeps_to_the_items_of_captures() -> None:
    fast = tuple((tokens, cost / 10) for tokens, cost in COSTS.eager)
    for items in (9, 20):
        made = plan(*[90] * items, costs=replace(COSTS, exact=fast))
        assert max(len(batch.indices) for batch in made.batches) <= 8
        assert made.misses == {MissReason.EXACT_IS_FASTER: items}


def test_the_own_forward_of_a_compiled_tower_takes_more() -> None:
    slow = tuple((tokens, cost * 1.1) for tokens, cost in COSTS.eager)
    made = plan(*[90] * 20, costs=replace(COSTS, exact=slow))
    assert made.misses == {MissReason.EAGER_IS_FASTER: 20}
    assert len(made.batches) == 1
    assert made.milliseconds == pytest.approx(0.3 + 16.0 + (1800 - 1600) * 5 / 448), "not the exact shape's"


def test_the_own_forward_takes_no_more_than_it_was_measured_with() -> None:
    costs = replace(COSTS, replay={**COSTS.replay, 4096: 80.0})
    assert len(plan(*[90] * 40, costs=costs).batches) == 1
    measured = tuple(point for point in COSTS.eager if point[0] <= 2048)
    made = plan(*[90] * 40, costs=replace(costs, eager=measured))
    assert max(batch.output_tokens for batch in made.batches) <= 2048


def test_the_greedy_packings_keep_to_their_items() -> None:
    for packing in ("greedy", "greedy_defer"):
        made = plan(*[90] * 20, packing=packing)
        assert max(len(batch.indices) for batch in made.batches) <= 8


def test_a_batch_is_no_larger_than_the_largest_budget() -> None:
    made = plan(*[200] * 20)
    assert max(batch.output_tokens for batch in made.batches) <= 2048
    assert sum(len(batch.indices) for batch in made.batches) == 20
