"""`mode: exact` in the manager: the token counts that come are captured, whatever images make them up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.manager.batches import BatchRunner
from fxsplit_encoder.planning.costs import PathCosts
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import PathPlan
from fxsplit_encoder.runtime import unpadded
from fxsplit_encoder.runtime.captured_program import CapturedProgram
from fxsplit_encoder.runtime.requests import CaptureScope
from fxsplit_encoder.runtime.unpadded import UnpaddedCaptures

EXACT = CaptureKey("default", 0)


@pytest.fixture(scope="module")
def exact(make_captured: Any) -> Any:
    """A manager that captures every token count at once."""
    return make_captured(mode="exact", exact_min_hits=1)


# All of 24 output tokens: one image, several, a video, and a video beside an image.
SAME_COUNT = (
    ([(1, 8, 12)], []),
    ([(1, 4, 4), (1, 4, 8), (1, 4, 12)], []),
    ([(1, 12, 8)], []),
    ([], [(3, 4, 8)]),
    ([(1, 4, 12)], [(3, 4, 4)]),
)


def test_other_images_of_the_same_count_replay_the_same_capture(
    exact: Any, make_batch: Any, assert_as_eager: Any
) -> None:
    for turn in range(2):
        for number, (images, videos) in enumerate(SAME_COUNT):
            inputs = make_batch(images, videos, seed=10 * turn + number)
            assert_as_eager(exact, inputs)
    assert exact.paths["default"].unpadded.sizes == [24]
    stats = exact.stats()
    assert (stats.hit_rate, stats.padding_fraction) == (1.0, 0.0)
    assert stats.budgets[EXACT].replays == 2 * len(SAME_COUNT)
    assert stats.budgets[EXACT].mode == "exact"
    assert "exact" in str(stats)


def test_nothing_is_captured_before_a_count_has_come_often_enough(
    make_manager: Any, make_batch: Any, assert_as_eager: Any
) -> None:
    manager = make_manager(mode="exact", exact_min_hits=3)
    assert manager.planned_captures().num_graphs == 0
    manager.capture()
    inputs = make_batch([(1, 4, 4), (1, 8, 4)])
    for turn in range(4):
        planned = manager.plan(inputs)
        (path,) = [batch.paths["default"] for batch in planned.batches]
        assert path.result == ("new_shape" if turn < 3 else "hit")
        assert path.budget == (12 if turn == 3 else None)
        assert_as_eager(manager, inputs)
    assert manager.stats().misses == {fx.MissReason.NEW_SHAPE: 4}
    assert manager.stats().hits == 4
    manager.clear()
    assert manager.paths["default"].unpadded.sizes == []
    assert_as_eager(manager, inputs)


def test_captures_at_exact_shapes_count_against_the_limit(make_captured: Any, make_batch: Any) -> None:
    limit = 300_000
    manager = make_captured(mode="exact", exact_min_hits=1, max_graph_bytes=limit)
    shapes = manager.paths["default"].unpadded
    held = []
    for side in range(1, 9):  # inputs of 6144 bytes a patch, 8 patches a step
        manager.execute(make_batch([(1, 2 * side, 4)]))
        assert manager.num_bytes <= limit
        held.append(len(shapes.sizes))
    assert max(held) > 1
    assert shapes.refused
    assert "max_graph_bytes" in next(iter(shapes.refused.values()))


# --- by cost


def test_a_manager_captures_nothing_later_if_told_so(
    make_manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CaptureScope, "measured", property(lambda self: True))
    recurring = [
        make_manager(mode=mode, capture_recurring=wanted).paths["default"].recurring_counts
        for mode, wanted in (("auto", True), ("auto", False), ("exact", False), ("full", True))
    ]
    assert recurring == ["cost", None, "hits", None]


def by_cost(replay_ms: float = 3.0) -> UnpaddedCaptures:
    def request(tokens: int, inputs: Any) -> Any:
        raise AssertionError("nothing is captured in these tests")

    scope = CaptureScope(fx.EncoderConfig(), GraphPool(torch.device("cpu")))
    replays = UnpaddedCaptures(request, scope)
    costs = PathCosts(replay={64: 2.0, 128: replay_ms}, exact=((64, 4.0), (128, 5.0)), eager=((64, 9.0),))
    replays.use_costs(costs, capture_ms=10.0)
    return replays


@pytest.mark.parametrize(
    ("planned", "replay_ms", "uses"),
    [
        (PathPlan(96, 128), 3.0, 20),  # 3 - 2.5 ms a use
        (PathPlan(64, 64), 3.0, None),  # no padding, nothing to gain
        (PathPlan(10, 64), 3.0, None),  # no capture is known to be cheaper than the smallest
        (PathPlan(128, None, fx.MissReason.NOT_CAPTURED), 3.0, 5),  # 5 - 3 ms a use
        (PathPlan(128, None, fx.MissReason.UNSUPPORTED_INPUT), 3.0, None),
        (PathPlan(0, 64), 3.0, None),
        (PathPlan(128, None, fx.MissReason.EXACT_IS_FASTER), 5.0, 20),  # no gain is foreseen: a tenth of 5 ms
    ],
)
def test_a_count_is_due_once_it_has_cost_what_its_capture_would(
    planned: PathPlan, replay_ms: float, uses: int | None
) -> None:
    replays = by_cost(replay_ms)
    for use in range(1, 41):
        if use == uses:
            with pytest.raises(AssertionError):
                replays.find(planned, by_cost=True)
            return
        assert replays.find(planned, by_cost=True) is None
    assert uses is None


@pytest.mark.parametrize("faster", ["replay", "exact"])
def test_a_trial_on_the_batch_in_hand_decides(
    faster: str, make_captured: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, assert_as_eager: Any
) -> None:
    monkeypatch.setattr(CapturedProgram, "recurring_counts", property(lambda self: "cost"))
    times = iter([1.0, 2.0] if faster == "replay" else [2.0, 1.0])
    runs = []

    def measured(run: Any, device: torch.device) -> float:
        runs.append(run())
        return next(times)

    monkeypatch.setattr(unpadded, "measure_ms", measured)
    manager = make_captured(mode="auto", token_budgets=(16, 64))
    path = manager.paths["default"]
    dear = ((16, 5.0), (64, 9.0))
    path.unpadded.use_costs(PathCosts(replay={16: 5.0, 64: 9.0}, exact=dear, eager=dear), capture_ms=1.0)
    inputs = make_batch([(1, 20, 16)])  # 80 tokens, more than a budget holds
    for _ in range(4):
        assert_as_eager(manager, inputs)
    assert len(runs) == 2, "one trial"
    assert (80 in path.unpadded) is (faster == "replay")
    stats = manager.stats()
    assert (stats.hits > 0) is (faster == "replay")
    assert fx.MissReason.EXTENT_EXCEEDED not in stats.misses


def test_a_trial_keeps_what_only_a_replay_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = by_cost()
    replays.on_trial.add(80)

    def refused() -> None:
        raise fx.InputError("only the tower's own forward is left")

    assert replays.keeps(80, lambda: None, refused)
    assert not replays.on_trial


TWO_BATCHES = PathCosts(
    replay={16: 10.0, 64: 38.0, 128: 75.0},
    exact=((16, 10.5), (64, 40.0), (128, 77.5)),
    eager=((128, 180.0),),
)


@pytest.fixture
def make_recurring(make_captured: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`make_recurring(costs)`: a manager of given costs that captures, without trials, what recurs."""

    def make(costs: PathCosts) -> Any:
        monkeypatch.setattr(CapturedProgram, "recurring_counts", property(lambda self: "cost"))
        monkeypatch.setattr(CapturedProgram, "costs", property(lambda self: costs))
        monkeypatch.setattr(UnpaddedCaptures, "keeps", lambda *batch: True)
        return make_captured(mode="auto", token_budgets=(16, 64, 128))

    return make


def budgets_of(plan: Any) -> list[int | None]:
    return sorted((batch.paths["default"].budget for batch in plan.batches), key=str)


def used(manager: Any, inputs: Any, times: int) -> list[Any]:
    """The plans after each of some requests. To ask for them changes nothing."""
    plans = []
    for _ in range(times):
        manager.execute(inputs)
        plans += [manager.plan(inputs) for _ in range(3)][-1:]
    return plans


def timing(monkeypatch: pytest.MonkeyPatch, times: dict[int, float]) -> list[int]:
    """Gives requests of so many batches these times; returns a list of the batches of what was timed."""
    timed: list[int] = []

    def milliseconds(runner: BatchRunner, plan: Any, mm_kwargs: dict[str, Any], specs: Any) -> float:
        runner.run(plan, mm_kwargs, specs, may_replay=True)
        timed.append(len(plan.batches))
        return times[len(plan.batches)]

    monkeypatch.setattr(BatchRunner, "milliseconds", milliseconds)
    return timed


@pytest.mark.parametrize(("one_batch", "is_kept"), [(39.0, True), (40.3, True), (41.0, False)])
def test_a_request_that_recurs_keeps_one_batch_unless_two_are_faster(
    one_batch: float,
    is_kept: bool,
    make_recurring: Any,
    make_batch: Any,
    monkeypatch: pytest.MonkeyPatch,
    assert_as_eager: Any,
) -> None:
    manager = make_recurring(TWO_BATCHES)
    timed = timing(monkeypatch, {2: 40.0, 1: one_batch})
    inputs = make_batch([(1, 16, 16), (1, 8, 8)])
    plans = [budgets_of(each) for each in used(manager, inputs, 9)]
    after = [80] if is_kept else [16, 64]
    assert plans == [[16, 64]] * 7 + [after] * 2
    assert timed == [2, 1]
    hits = manager.stats().hits
    for _ in range(3):
        assert_as_eager(manager, inputs)
    assert manager.stats().hits - hits == 6, "two images each"


DEAR = replace(TWO_BATCHES, replay={16: 10.0, 64: 38.0, 128: 115.0}, exact=((16, 10.5), (128, 117.0)))


@pytest.mark.parametrize(("costs", "refused"), [(DEAR, {}), (TWO_BATCHES, {80: "out of memory"})])
def test_two_batches_stay_where_one_is_foreseen_to_lose_much_or_cannot_be_captured(
    costs: PathCosts,
    refused: dict[int, str],
    make_recurring: Any,
    make_batch: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_recurring(costs)
    timed = timing(monkeypatch, {})
    manager.paths["default"].unpadded.refused.update(refused)
    plans = used(manager, make_batch([(1, 16, 16), (1, 8, 8)]), 9)
    assert [budgets_of(each) for each in plans] == [[16, 64]] * 9
    assert timed == []


def test_fewer_batches_that_run_out_of_memory_lose_no_request(
    make_recurring: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, assert_as_eager: Any
) -> None:
    manager = make_recurring(TWO_BATCHES)
    inputs = make_batch([(1, 16, 16), (1, 8, 8)])

    def milliseconds(runner: BatchRunner, plan: Any, mm_kwargs: dict[str, Any], specs: Any) -> float:
        if len(plan.batches) == 1:
            raise torch.OutOfMemoryError("no memory for one batch")
        return 40.0

    monkeypatch.setattr(BatchRunner, "milliseconds", milliseconds)
    for _ in range(9):
        assert_as_eager(manager, inputs)
    assert budgets_of(manager.plan(inputs)) == [16, 64]


def test_what_is_timed_counts_as_no_request(
    make_recurring: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_recurring(TWO_BATCHES)
    inputs = make_batch([(1, 16, 16), (1, 8, 8)])
    used(manager, inputs, 8)
    assert manager.stats().hits == 16


def test_a_batch_that_recurs_at_its_exact_shape_is_captured(make_recurring: Any, make_batch: Any) -> None:
    costs = replace(TWO_BATCHES, replay={16: 10.0, 64: 38.0, 128: 90.0}, exact=((16, 10.5), (128, 60.0)))
    manager = make_recurring(costs)
    manager.paths["default"].unpadded.use_costs(costs, capture_ms=1e9)  # never due by what it costs
    inputs = make_batch([(1, 20, 16)])
    assert [budgets_of(each) for each in used(manager, inputs, 10)] == [[None]] * 8 + [[80]] * 2
    assert manager.stats().hits == 2
