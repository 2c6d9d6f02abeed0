"""`mode: exact` in the manager: the token counts that come are captured, whatever images make them up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.manager.batches import BatchRunner
from fxsplit_encoder.planning.costs import PathCosts
from fxsplit_encoder.planning.limits import CaptureKey
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


def test_a_manager_captures_nothing_later_if_told_so(
    make_manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CaptureScope, "measured", property(lambda self: True))
    recurring = [
        make_manager(mode=mode, capture_recurring=wanted).paths["default"].recurring_counts
        for mode, wanted in (("auto", True), ("auto", False), ("exact", False), ("full", True))
    ]
    assert recurring == ["cost", None, "hits", None]


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


def timing(monkeypatch: pytest.MonkeyPatch, times: dict[int, float | None]) -> list[int]:
    """Gives requests of so many batches these times (None: no memory); returns the batches of each."""
    timed: list[int] = []

    def milliseconds(runner: BatchRunner, plan: Any, mm_kwargs: dict[str, Any], specs: Any) -> float:
        runner.run(plan, mm_kwargs, specs, may_replay=True)
        timed.append(len(plan.batches))
        if (milliseconds := times[len(plan.batches)]) is None:
            raise torch.OutOfMemoryError
        return milliseconds

    monkeypatch.setattr(BatchRunner, "milliseconds", milliseconds)
    return timed


@pytest.mark.parametrize(("one_batch", "is_kept"), [(39.0, True), (40.3, True), (41.0, False), (None, False)])
def test_a_request_that_recurs_keeps_one_batch_unless_two_are_faster(
    one_batch: float | None,
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


def test_what_is_timed_counts_as_no_request(make_recurring: Any, make_batch: Any) -> None:
    manager = make_recurring(TWO_BATCHES)
    used(manager, make_batch([(1, 16, 16), (1, 8, 8)]), 8)
    assert manager.stats().hits == 16


def test_a_batch_that_recurs_at_its_exact_shape_is_captured(make_recurring: Any, make_batch: Any) -> None:
    costs = replace(TWO_BATCHES, replay={16: 10.0, 64: 38.0, 128: 90.0}, exact=((16, 10.5), (128, 60.0)))
    manager = make_recurring(costs)
    manager.paths["default"].unpadded.use_costs(costs, capture_ms=1e9)  # never due by what it costs
    inputs = make_batch([(1, 20, 16)])
    assert [budgets_of(each) for each in used(manager, inputs, 10)] == [[None]] * 8 + [[80]] * 2
    assert manager.stats().hits == 2
