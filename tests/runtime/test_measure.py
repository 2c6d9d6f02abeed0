from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxsplit_encoder.capture.forward import MeasuredRun
from fxsplit_encoder.capture.ladder import MeasuredCosts
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.runtime import measure
from fxsplit_encoder.runtime.measure import MeasuredForward, measure_forward, run_timed
from fxsplit_encoder.runtime.requests import CaptureScope

# Attention takes 1 ms over 10 tokens in one segment, 4 ms over 20.
MEASURED = MeasuredForward(eager=((10, 9.0),), attention=1 / 1600, rows_per_token=4.0)


def ladder(costs: dict[int, MeasuredCosts], exact: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(captured={budget: None for budget in costs if budget not in exact}, costs=costs)


def test_costs_lack_the_attention_of_the_measured_segment() -> None:
    costs = {
        10: MeasuredCosts({"full": 2.0, "piecewise": 3.0}, exact=4.0, host=0.5, single_segment=1.5),
        20: MeasuredCosts({}, exact=8.0, host=0.5),
    }
    path_costs = MEASURED.with_captures(ladder(costs, exact=(20,)), {10: 8}, compiled=True)
    assert MEASURED.attention_ms(20) == pytest.approx(4.0)
    assert path_costs.replay == pytest.approx({10: 1.0})
    assert path_costs.one_segment == pytest.approx({10: 0.5})
    assert dict(path_costs.exact) == pytest.approx({10: 3.0, 20: 4.0})
    assert dict(path_costs.eager) == pytest.approx({10: 8.0})
    assert (path_costs.attention, path_costs.max_segments, path_costs.measured) == (1 / 1600, {10: 8}, True)


def test_nothing_unpadded_costs_less_than_the_host_needs() -> None:
    costs = {20: MeasuredCosts({"full": 8.0}, exact=8.0, host=6.0, attention=MEASURED.attention_ms(20))}
    assert costs[20].exact_price == pytest.approx(8.2), "5 % of what is not attention"
    forward = replace(MEASURED, eager=((10, 9.0), (20, 20.0)), eager_host=8.5)
    path_costs = forward.with_captures(ladder(costs), {}, compiled=True)
    assert dict(path_costs.exact) == pytest.approx({20: 6.0}), "not 8.2 - 4.0"
    assert path_costs.replay[20] < path_costs.exact[0][1]
    assert dict(path_costs.eager) == pytest.approx({10: 8.5, 20: 16.0}), "not 9.0 - 1.0"


@pytest.mark.parametrize("compiled", [True, False])
def test_no_batch_costs_nothing_however_much_attention_was_found(compiled: bool) -> None:
    """Other work on the device slowed the runs that attention was found from, and not those of the ladder."""
    found = MeasuredForward(((10, 2.0), (20, 3.0)), attention=1.0, rows_per_token=4.0)
    costs = {
        10: MeasuredCosts({"full": 1.0}, 1.5, 0.1, found.attention_ms(10), single_segment=0.9),
        20: MeasuredCosts({}, 2.5, 0.1, found.attention_ms(20)),
    }
    assert costs[20].exact_price == 2.5
    path_costs = found.with_captures(ladder(costs, exact=(20,)), {}, compiled=compiled)
    points = (*path_costs.exact, *path_costs.eager)
    alone = [*path_costs.replay.values(), *path_costs.one_segment.values(), *(cost for _, cost in points)]
    assert len(alone) == (6 if compiled else 4) and min(alone) > 0
    pairs = {10: 1600, 20: 6400}
    for budget, milliseconds in ((10, 0.9), (10, 1.0), (10, 1.5), (20, 2.5)):
        assert path_costs.attention * pairs[budget] <= 0.95001 * milliseconds


def test_where_memory_ran_out_no_time_is_known() -> None:
    costs = {
        10: MeasuredCosts({"full": 2.0}, exact=4.0),
        20: MeasuredCosts({"full": 5.0}, exact=math.inf, host=math.inf),
    }
    path_costs = MEASURED.with_captures(ladder(costs), {}, compiled=True)
    assert [tokens for tokens, _ in path_costs.exact] == [10]
    assert math.isfinite(path_costs.table((10, 20), 20, False).fallback(15)[0])


class Forward:
    """A forward of four rows a token, which takes as many milliseconds as it has tokens."""

    device = torch.device("cpu")

    def __init__(self, fails: dict[int, Exception] | None = None, compiled: bool = True) -> None:
        self.fails = fails or {}
        self.ran: list[int] = []
        self.program = (
            SimpleNamespace(tokens=lambda rows: 4 * rows, region=SimpleNamespace(frame_lengths=None))
            if compiled
            else None
        )

    def capture_values(self, budget: int) -> int:
        return budget

    def __call__(self, tokens: int) -> int:
        self.ran.append(tokens)
        if tokens in self.fails:
            raise self.fails[tokens]
        return tokens


def told(run: Callable[[float], MeasuredRun]) -> Callable[..., MeasuredRun]:
    """In place of a clock: a run takes the milliseconds that the forward returns."""
    return lambda call, device: run(float(call()))


@pytest.fixture
def as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_run", told(lambda ms: MeasuredRun(ms, 0.0)))


@pytest.mark.usefixtures("as_told")
def test_the_towers_own_forward_is_timed_at_halves_of_the_largest_size() -> None:
    found = measure_forward(Forward(), (10, 20, 30, 40, 50))
    assert found == MeasuredForward(((10, 10.0), (20, 20.0), (50, 50.0)), 0.0, rows_per_token=4.0)


@pytest.mark.usefixtures("as_told")
def test_sizes_below_one_that_the_host_bounds_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_run", told(lambda ms: MeasuredRun(max(ms, 19.0), 19.0)))
    found = measure_forward(Forward(), (2, 5, 10, 20, 40, 80))
    assert found.eager == ((20, 20.0), (40, 40.0), (80, 80.0))
    assert found.eager_host == 19.0


@pytest.mark.usefixtures("as_told")
def test_sizes_that_a_tower_refuses_are_left_out_and_memory_may_run_out() -> None:
    refused: Any = Forward({10: InputError("too small")})
    assert [tokens for tokens, _ in measure_forward(refused, (10, 20, 40)).eager] == [20, 40]
    full: Any = Forward({20: torch.OutOfMemoryError(), 40: torch.OutOfMemoryError()})
    found = measure_forward(full, (10, 20, 40))
    assert (found.eager, found.out_of_memory) == (((10, 10.0),), 20)


def test_what_will_be_timed_of_the_towers_own_forward_can_be_run_before() -> None:
    forward, own = Forward({20: torch.OutOfMemoryError("none left")}), Forward(compiled=False)
    for each in (forward, own):
        run_timed(each, (4, 10, 16, 20, 40))
    assert forward.ran == [40, 20, 10]
    assert own.ran == [], "captures run it"


@pytest.mark.usefixtures("as_told")
@pytest.mark.parametrize(("memory", "timed", "ran_out"), [(99, [50], None), (40, [50, 20], 50)])
def test_attention_is_timed_at_the_largest_size_that_memory_holds(
    memory: int, timed: list[int], ran_out: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def attention_cost(forward: Any, tokens: int) -> float:
        tried.append(tokens)
        if tokens > memory:
            raise torch.OutOfMemoryError
        return 0.25

    monkeypatch.setattr(measure, "attention_cost", attention_cost)
    found = measure_forward(Forward(), (10, 20, 30, 40, 50))
    assert tried == timed
    assert (found.attention, found.out_of_memory) == (0.25, ran_out)
    assert [tokens for tokens, _ in found.eager] == [10, 20, 50]


@pytest.mark.parametrize(("host", "attention"), [(0.5, 0.01), (1.9, 0.0)])
def test_attention_between_runs_that_the_host_bounds_is_not_told(
    host: float, attention: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their difference is noise, which would be taken off every replay."""
    walls = {1: 2.0, measure.MEASURED_SEGMENTS: 1.0}

    def timed(run: Any, device: Any) -> MeasuredRun:
        return MeasuredRun(walls[run], host)

    monkeypatch.setattr(measure, "_attention_run", lambda forward, values, segments: segments)
    monkeypatch.setattr(measure, "measure_run", timed)
    forward: Any = SimpleNamespace(program=SimpleNamespace(tokens=lambda values: 10), device=None)
    found = measure.attention_cost(forward, {})
    assert found == pytest.approx(attention / (1 - 1 / measure.MEASURED_SEGMENTS))


class MeasuredScope(CaptureScope):
    @property
    def measured(self) -> bool:
        return True


def test_a_traced_tower_is_measured_before_it_is_captured(make_manager: Any) -> None:
    manager = make_manager(mode="full")
    path = manager.paths["default"]
    path.scope = MeasuredScope(manager.config, path.scope.pool)
    manager.capture()
    found = path.measured
    budgets = path.budgets
    timed = [tokens for tokens, _ in found.eager]
    assert timed[-1] == budgets[-1]
    assert all(2 * one <= next_one for one, next_one in itertools.pairwise(timed))
    assert all(milliseconds > 0 for _, milliseconds in found.eager)
    assert found.rows_per_token == 4
    assert found.attention >= 0
    assert found.out_of_memory is None
    assert not path.costs.measured, "captures were not timed, so nothing is compared with them"
    manager.clear()


def test_the_eager_forward_of_what_did_not_compile_was_timed_at_every_budget() -> None:
    costs = {
        10: MeasuredCosts({"full": 2.0}, exact=16.0, host=15.0),
        20: MeasuredCosts({"full": 4.0}, exact=16.0, host=15.0),
        40: MeasuredCosts({}, exact=40.0, host=15.0),
    }
    measured = MeasuredForward(eager=((10, 16.0), (40, 40.0)))
    path_costs = measured.with_captures(ladder(costs, exact=(40,)), {}, compiled=False)
    assert path_costs.exact == ()
    # A line from 10 to 40 would say 24 at 20.
    assert dict(path_costs.eager) == pytest.approx({10: 16.0, 20: 16.0, 40: 40.0})


def test_replays_lack_the_attention_of_the_inputs_that_they_were_timed_with() -> None:
    """A tower of vLLM's lays captures out as eight images: without this, attention over one segment as long
    as a large budget left nothing of its price, and the smallest image replayed it.
    """
    eight = MeasuredForward(attention=1 / 1600, rows_per_token=4.0, share=1 / 8)
    costs = {
        10: MeasuredCosts({"full": 2.0}, exact=9.0, host=0.5),
        40: MeasuredCosts({"full": 8.0}, exact=30.0, host=0.5, single_segment=20.0),
    }
    found = eight.with_captures(ladder(costs), {}, compiled=True)
    assert eight.attention_ms(40) == pytest.approx(16.0), "exact runs are on one segment"
    assert found.replay == pytest.approx({10: 2.0 - 1 / 8, 40: 8.0 - 16 / 8})
    assert found.one_segment == pytest.approx({40: 4.0})
    assert dict(found.exact) == pytest.approx({10: 8.0, 40: 14.0})

    as_it_is = replace(eight, runs_share=1 / 8)
    found = as_it_is.with_captures(ladder(costs), {}, compiled=False)
    assert as_it_is.attention_ms(40) == pytest.approx(2.0)
    assert dict(found.eager) == pytest.approx({10: 9.0 - 1 / 8, 40: 28.0})


class OwnCode:
    """A forward that was not compiled, whose attention takes a millionth of a millisecond a pair."""

    device = torch.device("cpu")
    program = None

    def __init__(self, segments: int, lengths: str = "cu_seqlens") -> None:
        self.segments = segments
        self.lengths = lengths

    def capture_values(self, budget: int) -> dict[str, Any]:
        rows = 4 * budget
        windows = torch.arange(0, rows + 1, 4, dtype=torch.int32)
        lengths = torch.arange(self.segments + 1, dtype=torch.int32) * rows // self.segments
        return {"pixels": torch.ones(rows), "windows": windows, self.lengths: lengths.to(torch.int32)}

    def __call__(self, inputs: dict[str, Any]) -> float:
        if self.lengths not in inputs:
            raise RuntimeError("no such input")
        return 1.0 + float((inputs[self.lengths].diff().double() ** 2).sum()) * 1e-6


@pytest.mark.usefixtures("as_told")
def test_attention_of_a_towers_own_code_is_what_one_segment_adds() -> None:
    found = measure_forward(OwnCode(8), (64, 128, 256, 512, 1024))
    assert found.eager == (), "the ladder times it at every budget"
    assert found.attention == pytest.approx(1e-6)
    assert (found.rows_per_token, found.share, found.runs_share) == (4.0, 1 / 8, 1 / 8)
    alone = measure_forward(OwnCode(1), (64, 128))
    assert (alone.attention, alone.share) == (0.0, 1.0)


@pytest.mark.usefixtures("as_told")
def test_attention_that_cannot_be_told_is_left_in_the_prices() -> None:
    class Refuses(OwnCode):
        def __call__(self, inputs: dict[str, Any]) -> float:
            raise RuntimeError("of its own")

    for forward in (Refuses(8), Forward(compiled=False)):
        if isinstance(forward, Forward):
            forward.capture_values = lambda budget: {"pixels": torch.ones(budget)}  # type: ignore
        assert measure_forward(forward, (64, 128)) == MeasuredForward()
