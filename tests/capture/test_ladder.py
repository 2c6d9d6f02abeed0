from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxsplit_encoder.capture import ladder
from fxsplit_encoder.capture.breakable import eager_break_during_capture
from fxsplit_encoder.capture.buffers import StaticBuffer
from fxsplit_encoder.capture.forward import CapturedForward, CaptureRequest, MeasuredRun
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.capture.ladder import BudgetLadder, MeasuredCosts
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import CaptureError, ConfigError
from fxsplit_encoder.kernels import choice
from fxsplit_encoder.kernels.attention import KernelChooser
from fxsplit_encoder.kernels.attention.chooser import Measurements
from fxsplit_encoder.pauses import pausing_by, recording
from tests.kernels.attention.fakes import FakeKernel, FakeMeter
from tests.kernels.attention.fakes import shape as attention_shape
from tests.pauses import Pauses

from .bodies import body_calling, request_of


def request(
    call: Callable[[], Any] | None = None, single_segment: Callable[[], CaptureRequest] | None = None
) -> CaptureRequest:
    body = body_calling(call or (lambda: [torch.zeros(2)]), can_break=True)
    return request_of(body, single_segment=single_segment)


@pytest.fixture
def requests() -> list[int]:
    return []


def make_ladder(
    mode: str,
    requests: list[int],
    make: Callable[[], CaptureRequest] = request,
    attention_ms: Callable[[int], float] = lambda budget: 0.0,
) -> BudgetLadder:
    def count(budget: int) -> CaptureRequest:
        requests.append(budget)
        return make()

    return BudgetLadder(count, mode, GraphPool(torch.device("cpu")), attention_ms=attention_ms)


@pytest.mark.parametrize(
    ("mode", "captured_mode"), [("auto", "full"), ("full", "full"), ("piecewise", "piecewise")]
)
def test_a_budget_is_captured_once_in_its_mode(mode: str, captured_mode: str, requests: list[int]) -> None:
    made = make_ladder(mode, requests)
    captured = made.capture(8)
    assert captured is not None
    assert made.capture(8) is captured
    assert captured.mode == captured_mode
    assert requests == [8]


@pytest.mark.parametrize("times", [1, 2])
def test_a_failure_in_one_mode_and_in_either_is_remembered_until_clear(
    times: int, requests: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    failures = [RuntimeError("not now")] * times

    def fail_at_first() -> Any:
        if failures:
            raise failures.pop()
        return [torch.zeros(2)]

    made = make_ladder("full", requests, lambda: request(fail_at_first))
    captured = made.capture(8)
    assert made.capture(8) is captured
    assert requests == [8]
    if captured is None:
        assert "not now" in made.dropped[8]
        assert "budget 8 is dropped" in caplog.text
    else:
        assert captured.mode == "piecewise"
        assert "captured in mode piecewise: in mode full" in made.replaced[8]
        assert "not now" in made.replaced[8]
    assert (captured is None) == (times == 2)
    made.clear()
    assert made.capture(8) is not None
    assert made.dropped == made.replaced == {}


def test_errors_that_are_not_about_capturing_are_not_hidden(requests: list[int]) -> None:
    def fail() -> Any:
        raise ConfigError("splitting_ops: wrong")

    with pytest.raises(ConfigError):
        make_ladder("full", requests, lambda: request(fail)).capture(8)


class Measured:
    """`auto` on a device: what each way of running is said to cost."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        costs: dict[str, float],
        fails: tuple[str, ...] = (),
        attention_ms: Callable[[int], float] = lambda budget: 0.0,
    ):
        self.released: list[str] = []
        self.requests: list[int] = []
        single_segment = lambda: request()  # noqa: E731
        self.ladder = make_ladder(
            "auto", self.requests, lambda: request(single_segment=single_segment), attention_ms
        )
        self.ladder.pool.is_cuda = True
        single = "single"

        def make(wanted: CaptureRequest, mode: str, pool: GraphPool) -> CapturedForward:
            captured = CapturedForward(wanted, mode, pool)
            name = mode if wanted.single_segment is not None else single

            def record(warmups: int) -> None:
                if name in fails:
                    raise CaptureError(f"{name} fails")
                captured.num_bytes = 5

            captured.record = record  # type: ignore[method-assign]
            captured.measure = lambda: costs[name]  # type: ignore[method-assign]
            release = captured.release
            captured.release = lambda: (self.released.append(name), release())  # type: ignore[method-assign]
            return captured

        monkeypatch.setattr(ladder, "CapturedForward", make)
        exact = MeasuredRun(costs["exact"], costs.get("host", costs["exact"]))
        monkeypatch.setattr(ladder, "measure_run", lambda call, device: exact)


COSTS = {"full": 2.0, "piecewise": 1.0, "exact": 3.0, "single": 0.5}


@pytest.mark.parametrize("single", [1.5, 0.5])
def test_auto_keeps_the_cheapest_mode_and_a_graph_for_one_segment_where_that_is_cheaper(
    single: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch, {**COSTS, "single": single})
    captured = measured.ladder.capture(8)
    assert captured is not None and captured.mode == "piecewise"
    assert measured.released == (["full", "single"] if single > 1 else ["full"])
    best = captured.for_one_segment
    assert (best and best.mode) == (None if single > 1 else "full")
    assert measured.ladder.num_bytes(8) == 15  # what was tried stays in the pool
    measured.ladder.clear()
    assert sorted(measured.released) == ["full", "piecewise", "single"]


@pytest.mark.parametrize(
    ("costs", "mode", "released"),
    [
        ({"exact": 1.01, "host": 0.7}, None, ["full", "piecewise"]),
        ({"exact": 1.0, "host": 0.8}, "piecewise", ["full"]),
        ({"exact": 1.0, "host": 0.8, "piecewise": 1.1}, None, ["full", "piecewise"]),
        ({"host": 1.4}, None, []),
        ({"host": 1.6}, "piecewise", ["full"]),
        ({"exact": math.inf, "host": math.inf}, "piecewise", ["full"]),
    ],
    ids=["no gain", "busy host", "costs more than the host's time", "never waits", "waits", "out of memory"],
)
def test_auto_captures_only_where_a_replay_gains(
    costs: dict[str, float], mode: str | None, released: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch, {**COSTS, **costs})
    made = measured.ladder
    for _ in range(2):
        captured = made.capture(8)
        assert (captured and captured.mode) == mode
    assert made.no_graph_needed == (set() if mode else {8})
    assert made.costs[8].exact == costs.get("exact", 3.0)
    assert (sorted(measured.released), measured.requests) == (released, [8])
    assert (made.num_bytes(8) > 0) == bool(released), "what was tried stays in the pool"


def test_what_recurs_is_captured_even_where_the_exact_shape_never_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside another process on the device each run takes longer than the host needs."""
    made = Measured(monkeypatch, {**COSTS, "exact": 1.0, "host": 0.1}).ladder
    made.exact_may_win = False
    assert made.capture(8) is not None


def test_attention_over_one_segment_does_not_hide_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of many short segments has hardly any of it."""
    costs = {"full": 10.0, "piecewise": 10.5, "exact": 10.0, "single": 10.0, "host": 4.0}
    assert Measured(monkeypatch, costs).ladder.capture(8) is None
    attending = Measured(monkeypatch, costs, attention_ms={8: 5.0}.__getitem__).ladder
    captured = attending.capture(8)
    assert captured is not None
    assert captured.mode == "full"
    measured = attending.costs[8]
    assert (measured.exact, measured.host, measured.attention) == (10.0, 4.0, 5.0)
    assert measured.exact_price == pytest.approx(10.25), "5 % of what is not attention"


def test_between_two_pauses_is_one_timing_or_one_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a request waits for no more than that."""
    measured = Measured(monkeypatch, COSTS)
    events: list[str] = []
    make, timed = ladder.CapturedForward, ladder.measure_run

    def making(*arguments: Any) -> CapturedForward:
        captured = make(*arguments)
        record, measure = recording()(captured.record), captured.measure
        captured.record = record  # type: ignore[method-assign]
        captured.measure = lambda: [events.append("time"), measure()][1]  # type: ignore
        return captured

    monkeypatch.setattr(ladder, "CapturedForward", making)
    monkeypatch.setattr(ladder, "measure_run", lambda *given: [events.append("exact"), timed(*given)][1])
    with pausing_by(Pauses(lambda: events.append("|"), at_capture=lambda: events.append("record"))):
        measured.ladder.capture(8)
    assert " ".join(events) == "exact | record | record | time | time | record | time"
    captured = measured.ladder.captured[8]
    assert (captured.mode, measured.ladder.capture_ms > 0) == ("piecewise", True)
    events.clear()
    measured.ladder.capture(8)
    assert not events, "once"


def test_what_a_capture_takes_is_told_without_the_comparisons_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = 0.0
    clock = SimpleNamespace(perf_counter=lambda: seconds)
    monkeypatch.setattr(ladder, "time", clock)
    monkeypatch.setattr(choice, "time", clock)

    class SlowMeter(FakeMeter):
        def measure(self, *given: Any) -> Any:
            nonlocal seconds
            seconds += 30.0
            return super().measure(*given)

    meter = SlowMeter({"one": 1.0, "two": 2.0})
    chooser = KernelChooser(measurements=Measurements([FakeKernel("one"), FakeKernel("two")], meter))
    tokens = iter((1024, 8192))

    def make() -> CaptureRequest:
        met = attention_shape(next(tokens))

        def run() -> list[Any]:
            nonlocal seconds
            seconds += 0.25
            chooser.ranking(met)
            return [torch.zeros(2)]

        return CaptureRequest(StaticInputs([]), run, StaticParameters(()), 8)

    made = make_ladder("breakable", [], make)
    for number, budget in enumerate((8, 16), 1):
        assert made.capture(budget) is not None
        assert len(meter.measured) == number and seconds > 30.0 * number
        assert 250.0 <= made.capture_ms <= 2000.0


def test_what_a_capture_would_run_is_run_once_and_nothing_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def wanted(name: str, **options: Any) -> CaptureRequest:
        return replace(request_of(body_calling(lambda: [torch.zeros(2)]), **options), body=run(name))

    def run(name: str) -> Callable[[], list[torch.Tensor]]:
        return lambda: [ran.append(name), [torch.zeros(2)]][1]  # type: ignore

    def make() -> CaptureRequest:
        return wanted("any", single_segment=lambda: wanted("single"))

    made = make_ladder("auto", [], make)
    made.pool.is_cuda = True
    runs: list[int] = []
    with pausing_by(Pauses(lambda: runs.append(len(ran)))):
        made.run(8)
    assert runs == [0, 1, 2], "a pause before each"
    assert ran == ["any", "single", "single"] and not made.captured and not made.costs
    made.expect({8: MeasuredCosts({"full": 1.0}, 1.0, mode="full")}, 1.0)
    made.run(8)
    assert len(ran) == 3, "of a known budget nothing is compared"


def test_auto_takes_what_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Measured(monkeypatch, COSTS, fails=("piecewise",)).ladder.capture(8)
    assert captured is not None and captured.mode == "full"
    neither = Measured(monkeypatch, COSTS, fails=("piecewise", "full")).ladder
    assert neither.capture(8) is None
    assert neither.dropped == {8: "full fails"}


# --- a module's own code


def module_request(body: Callable[[], Any]) -> CaptureRequest:
    x = StaticBuffer("x", torch.ones(8, 2))
    return CaptureRequest(StaticInputs([x]), lambda: [body()], StaticParameters(()), 8)


def module_ladder(
    monkeypatch: pytest.MonkeyPatch, run: MeasuredRun, body: Callable[[], Any] = lambda: torch.ones(2) + 1
) -> tuple[BudgetLadder, list[int], list[tuple[str, int]]]:
    """A measured ladder whose code takes as long as is said; what is timed, and the (modes, warm-ups) that
    are recorded."""
    timed: list[int] = []
    recorded: list[tuple[str, int]] = []
    budgets: list[int] = []
    record = CapturedForward.record

    def made(budget: int) -> CaptureRequest:
        budgets.append(budget)
        return module_request(body)

    def measured(call: Any, device: torch.device) -> MeasuredRun:
        timed.append(budgets[-1])
        return run

    def recording(self: CapturedForward, warmups: int) -> None:
        recorded.append((self.mode, warmups))
        self.pool.is_cuda = False  # a recording of calls stands in for graphs
        record(self, warmups)
        self.pool.is_cuda = True

    monkeypatch.setattr(ladder, "measure_run", measured)
    monkeypatch.setattr(CapturedForward, "measure", lambda self: 1.0)
    monkeypatch.setattr(CapturedForward, "record", recording)
    found = BudgetLadder(made, "auto", GraphPool(torch.device("cpu")))
    found.pool.is_cuda = True
    return found, timed, recorded


def test_code_that_the_host_bounds_is_not_timed_again_at_smaller_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, timed, recorded = module_ladder(monkeypatch, MeasuredRun(10.0, 9.5))
    for budget in (8, 4, 2):
        assert made.capture(budget) is not None
    assert timed == [8]
    assert {costs.exact for costs in made.costs.values()} == {10.0}
    assert recorded == [("full", 1)] * 3, "one mode, which ran before"
    assert made.capture(16) is not None
    assert timed == [8, 16], "a larger one may be bound by the device"
    made.clear()
    made.capture(4)
    assert timed == [8, 16, 4]
    bound_by_device, timed, _ = module_ladder(monkeypatch, MeasuredRun(10.0, 6.0))
    for budget in (8, 4):
        bound_by_device.capture(budget)
    assert timed == [8, 4], "timed at every size"


def test_both_modes_are_tried_where_code_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    breaking = eager_break_during_capture(lambda: torch.zeros(2))
    made, _, recorded = module_ladder(monkeypatch, MeasuredRun(10.0, 9.5), lambda: breaking() + 1)
    made.capture(8)
    assert [mode for mode, _ in recorded] == ["full", "breakable"]


UNKNOWN = {"exact": math.nan}  # to ask for a replay's time is a KeyError


def refuse_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> MeasuredRun:
        raise AssertionError("nothing is timed where it is known")

    monkeypatch.setattr(ladder, "measure_run", fail)


@pytest.mark.parametrize("single", [0.5, 1.5])
def test_what_another_ladder_found_is_captured_without_timing(
    single: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Measured(monkeypatch, {**COSTS, "single": single}).ladder
    first.capture(8)
    known = first.known()
    assert known[8].mode == "piecewise"
    second = Measured(monkeypatch, UNKNOWN)
    second.ladder.expect(known, first.capture_ms)
    refuse_to_measure(monkeypatch)
    for _ in range(2):
        captured = second.ladder.capture(8)
        assert captured is not None and captured.mode == "piecewise"
        assert second.ladder.costs == first.costs
        assert (captured.for_one_segment is None) == (single > 1)
        assert second.ladder.capture_ms == first.capture_ms
        assert second.ladder.known() == known
        second.ladder.clear()  # what is known stays known


def test_a_budget_that_needed_no_graph_makes_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Measured(monkeypatch, {**COSTS, "host": 1.4}).ladder
    assert first.capture(8) is None
    second = Measured(monkeypatch, UNKNOWN)
    second.ladder.expect(first.known(), 1.0)
    refuse_to_measure(monkeypatch)
    assert second.ladder.capture(8) is None
    assert second.ladder.no_graph_needed == {8} and second.requests == []


def test_what_cannot_be_captured_as_it_was_is_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = Measured(monkeypatch, COSTS).ladder
    first.capture(8)
    second = Measured(monkeypatch, COSTS, fails=("piecewise",)).ladder
    second.expect(first.known(), 1.0)
    captured = second.capture(8)
    assert captured is not None and captured.mode == "full"
    assert "budget 8 is measured again: in mode piecewise piecewise fails" in caplog.text
    assert second.costs[8].modes == {"full": 2.0}


def test_a_budget_that_was_dropped_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Measured(monkeypatch, COSTS).ladder
    first.capture(8)
    first.drop(8, "no room")
    assert first.known() == {}
