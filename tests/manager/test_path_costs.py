from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fxsplit_encoder.capture.ladder import MeasuredCosts
from fxsplit_encoder.manager.path_costs import PathCosts

# Attention takes 1 ms over 10 tokens in one segment, 4 ms over 20.
MEASURED = PathCosts(eager=((10, 9.0),), attention=1 / 1600, rows_per_token=4.0)


def ladder(costs: dict[int, MeasuredCosts], exact: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(captured={budget: None for budget in costs if budget not in exact}, costs=costs)


def test_costs_lack_the_attention_of_the_measured_segment() -> None:
    costs = {
        10: MeasuredCosts({"full": 2.0, "piecewise": 3.0}, exact=4.0, host=0.5, one_segment=1.5),
        20: MeasuredCosts({}, exact=8.0, host=0.5),
    }
    route = MEASURED.with_captures(ladder(costs, exact=(20,)), {10: 8}, compiled=True)
    assert MEASURED.attention_ms(20) == pytest.approx(4.0)
    assert route.replay == pytest.approx({10: 1.0})
    assert route.one_segment == pytest.approx({10: 0.5})
    assert dict(route.exact) == pytest.approx({10: 3.0, 20: 4.0})
    assert dict(route.eager) == pytest.approx({10: 8.0})
    assert (route.attention, route.room, route.measured) == (1 / 1600, {10: 8}, True)


def test_an_exact_run_costs_no_less_than_the_host_needs() -> None:
    costs = {20: MeasuredCosts({"full": 8.0}, exact=8.0, host=6.0, attention=MEASURED.attention_ms(20))}
    assert costs[20].exact_price == pytest.approx(8.4)
    route = MEASURED.with_captures(ladder(costs), {}, compiled=True)
    assert dict(route.exact) == pytest.approx({20: 6.0}), "not 8.4 - 4.0"
    assert route.replay[20] < route.exact[0][1]


def test_what_did_not_compile_has_no_exact_shape() -> None:
    costs = {10: MeasuredCosts({"full": 2.0}, exact=math.inf, host=math.inf)}
    route = MEASURED.with_captures(ladder(costs), {}, compiled=False)
    assert route.exact == ()
    assert route.eager


def test_unmeasured_captures_are_only_preferred_to_one_another() -> None:
    assert not MEASURED.with_captures(ladder({}), {}, compiled=True).measured
