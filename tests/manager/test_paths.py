"""Towers with several paths: each is packed, captured, replayed and counted by its own tokens."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.capture.ladder import MeasuredCosts
from fxsplit_encoder.capture.pool import GraphPool

from . import managers
from .managers import captured_budgets
from .mock_towers import AlwaysBothPaths, PathsModel, PathsOfTiles, assert_serves, items

OVER = fx.MissReason.OVER_LARGEST_BUDGET
captured = functools.partial(managers.captured, compile=False)
NOT_CAPTURED = fx.MissReason.NOT_CAPTURED


def replays(manager: fx.EncoderCudaGraphManager) -> dict[tuple[str, int], int]:
    return {key[:2]: stats.replays for key, stats in manager.stats().budgets.items() if stats.replays}


SCENARIOS = {
    # rows of the items; hits, misses, replays, fallback runs
    "both hit": ([(3, 2)], 1, {}, {("global", 4): 1, ("local", 4): 1}, {}),
    "local is skipped": ([(3, 0)], 1, {}, {("global", 4): 1}, {}),
    "local misses": ([(3, 17)], 0, {OVER: 1}, {("global", 4): 1}, {"eager": 1}),
    "global misses": ([(17, 2)], 0, {OVER: 1}, {("local", 4): 1}, {"eager": 1}),
    "global misses and local is skipped": ([(17, 0)], 0, {OVER: 1}, {}, {"eager": 1}),
    "both miss": ([(17, 17)], 0, {OVER: 1}, {}, {"eager": 2}),
    "a packed batch": ([(3, 2), (4, 0), (1, 6)], 3, {}, {("global", 8): 1, ("local", 8): 1}, {}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_vllm_51461_vllm_52115_every_path_hits_misses_or_is_skipped_by_itself(scenario: str) -> None:
    sizes, hits, misses, replayed, fallbacks = SCENARIOS[scenario]
    model = PathsModel()
    manager = captured(model)
    model.runs.clear()
    assert_serves(manager, items(model, *sizes))
    stats = manager.stats()
    assert (stats.hits, stats.misses, stats.items) == (hits, misses, len(sizes))
    assert (replays(manager), stats.fallback_runs) == (replayed, fallbacks)
    assert sum(n for (name, _), n in model.runs.items() if name == "eager") == fallbacks.get("eager", 0)
    for path, number in (("global", 0), ("local", 1)):
        real = sum(size[number] for size in sizes)
        counted = sum(s.real_tokens for key, s in stats.budgets.items() if key.path == path)
        assert counted == (real if any(name == path for name, _ in replayed) else 0)


@pytest.mark.parametrize("make", [PathsModel, AlwaysBothPaths, PathsOfTiles])
def test_a_replay_may_overwrite_what_every_other_capture_returned(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures share the memory of their outputs on a device; here it is made to look so."""
    model = make()
    manager = captured(model)
    captures = [each for path in manager.paths_by_key.values() for each in path.captured.values()]
    replay = CapturedForward.replay

    def overwriting(self: CapturedForward, **options: Any) -> list[Any]:
        for other in captures:
            if other is not self:
                for output in other.outputs:
                    output.fill_(torch.nan)
        return replay(self, **options)

    monkeypatch.setattr(CapturedForward, "replay", overwriting)
    for sizes in ([(3, 2)], [(3, 2), (4, 0), (1, 6)], [(3, 0)], [(17, 2), (2, 17)]):
        assert_serves(manager, items(model, *sizes))
    assert {path for path, _ in replays(manager)} == set(model.path_configs)


def test_omni_7659_items_are_parsed_once_a_request() -> None:
    class Counting(PathsModel):
        parsed = 0

        def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
            self.parsed += 1
            return super().get_encoder_cudagraph_item_specs(mm_kwargs)

    model = Counting()
    manager = captured(model)
    manager.execute(items(model, (9, 1), (16, 2), (12, 0)))
    assert sum(stats.replays for stats in manager.stats().budgets.values()) > 2
    assert model.parsed == 1


def test_omni_6587_memory_is_given_back_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = captured(PathsModel())
    captures = [c for path in manager.paths.values() for c in path.captured.values()]
    held: list[int] = []
    retire = GraphPool.retire

    def spy(pool: GraphPool) -> None:
        held.append(sum(bool(capture.outputs) for capture in captures))
        retire(pool)

    monkeypatch.setattr(GraphPool, "retire", spy)
    manager.clear()
    assert held == [0]  # once, after every capture was released


@pytest.mark.parametrize(
    ("local", "budgets", "hits", "misses"),
    [
        ({"token_budgets": [0, 8]}, [8], 2, {}),
        ({"token_budgets": [0]}, [], 1, {NOT_CAPTURED: 1}),  # a path that lists it alone is never captured
        ({"mode": "none"}, [], 1, {NOT_CAPTURED: 1}),
    ],
)
def test_a_path_has_settings_of_its_own_and_a_budget_of_zero_is_a_skip(
    local: dict[str, Any], budgets: list[int], hits: int, misses: dict[fx.MissReason, int]
) -> None:
    model = PathsModel()
    manager = captured(model, paths={"local": local})
    assert captured_budgets(manager) == {"global": [4, 8, 16], "local": budgets}
    assert not any(budget == 0 for _, budget, _ in model.prepared)
    assert manager.plan(items(model, (3, 0))).batches[0].paths["local"].skipped
    for size in ((3, 0), (3, 2)):
        assert_serves(manager, items(model, size))
    assert (manager.stats().hits, manager.stats().misses) == (hits, misses)
    assert not any(key.budget == 0 for key in manager.stats().budgets)


def test_captures_are_judged_by_the_attention_that_was_measured() -> None:
    path = captured(PathsModel()).paths["global"]
    path.measured = replace(path.measured, attention=0.5, rows_per_token=4.0)
    assert path.ladder.attention_ms(2) == 0.5 * 8**2


def test_statistics_show_how_long_a_replay_took_when_it_was_measured() -> None:
    manager = captured(PathsModel())
    manager.paths["global"].ladder.costs[8] = MeasuredCosts({"full": 2.5, "piecewise": 3.0}, exact=4.0)
    shown = manager.stats().budgets.items()
    times = {key.budget: each.mean_milliseconds for key, each in shown if key.path == "global"}
    assert times == {4: None, 8: 2.5, 16: None}


@pytest.fixture(scope="module")
def managers() -> dict[str, fx.EncoderCudaGraphManager]:
    own = {"local": {"token_budgets": [0, 3, 12]}}
    return {
        "two": captured(PathsModel(), paths=own, max_items_per_batch=3),
        "always": captured(AlwaysBothPaths()),
        "tiles": captured(PathsOfTiles(), packing="greedy"),
        "defer": captured(PathsModel(), packing="greedy_defer"),
    }


rows = st.integers(0, 20)
requests = st.lists(st.tuples(st.integers(1, 20), rows), max_size=7)


@settings(max_examples=60)
@given(st.sampled_from(["two", "always", "tiles", "defer"]), st.lists(requests, max_size=3))
def test_found_g_found_h_vllm_52376_any_sequence_of_batches_equals_eager_and_is_counted_once(
    managers: Any, name: str, sequence: Any
) -> None:
    manager = managers[name]
    for number, sizes in enumerate(sequence):
        inputs = items(manager.tower, *sizes, seed=number)
        before = manager.stats()
        assert_serves(manager, inputs)
        after = manager.stats()
        assert after.items == before.items + len(sizes)
        assert after.hits == before.hits + manager.plan(inputs).hits
