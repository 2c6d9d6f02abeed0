"""Capture axes: graphs that differ by more than their budget, one for each combination of keys."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.limits import CaptureKey

from . import managers
from .mock_towers import AxesAndPaths, AxesModel, assert_equal_items, assert_serves, eagerly, items

BUDGETS = (4, 8)
COMBINATIONS = list(itertools.product((4, 8), (1, 2)))
make, captured = (
    functools.partial(made, token_budgets=BUDGETS, max_items_per_batch=3, compile=False)
    for made in (managers.manager_of, managers.captured)
)


@pytest.fixture(scope="module")
def manager() -> fx.EncoderCudaGraphManager:
    return captured(AxesModel())


@pytest.fixture(scope="module")
def with_paths() -> fx.EncoderCudaGraphManager:
    return captured(AxesAndPaths())


def captures(manager: fx.EncoderCudaGraphManager) -> set[CaptureKey]:
    return {path.key(budget) for path in manager.paths_by_key.values() for budget in path.captured}


requests = st.lists(
    st.tuples(st.integers(1, 10), st.integers(0, 9), st.sampled_from(COMBINATIONS)), max_size=7
)


@settings(max_examples=80)
@given(st.booleans(), st.lists(requests, max_size=3))
def test_any_sequence_of_batches_equals_eager(
    manager: Any, with_paths: Any, has_paths: bool, sequence: list[list[tuple[int, int, tuple[int, int]]]]
) -> None:
    """Of two axes and one path, or of one axis and two paths."""
    tested = with_paths if has_paths else manager
    for seed, request in enumerate(sequence):
        sizes = [each[: 1 + has_paths] for each in request]
        keys = [each[: 2 - has_paths] for *_, each in request]
        inputs = items(tested.tower, *sizes, keys=keys, seed=seed)
        before = tested.stats().items
        assert_equal_items(tested.execute(inputs), eagerly(tested.tower, inputs))
        assert tested.stats().items == before + len(request)


def test_keys_that_were_never_captured_fall_back_and_are_counted() -> None:
    manager = captured(AxesModel())
    inputs = items(manager.tower, (3,), (2,), (3,), keys=[(4, 1), (6, 1), (6, 1)])
    assert manager.plan(inputs).misses == {fx.MissReason.NOT_CAPTURED: 2}
    assert_serves(manager, inputs)
    stats = manager.stats()
    assert (stats.hits, stats.misses) == (1, {fx.MissReason.NOT_CAPTURED: 2})
    assert stats.fallback_runs == {"eager": 1}


class Ranged(AxesModel):
    """Of eight columns an item has at least six tokens, of four at most two."""

    ranges: ClassVar[dict[int, tuple[int, int]]] = {4: (1, 2), 8: (6, 8)}

    def get_encoder_cudagraph_item_token_range(self, path: str, axis_keys: Any) -> tuple[int, int] | None:
        assert path == "default"
        return self.ranges.get(axis_keys[0])


def test_omni_7659_what_no_batch_can_reach_is_pruned_by_the_tokens_of_an_item() -> None:
    model = Ranged()
    manager = make(model, token_budgets=(4, 8, 16))
    planned = manager.planned_captures()
    pruned = {capture.key: capture.pruned for capture in planned.captures if capture.pruned}
    # At most three items: of four columns no batch has more than 6 tokens, of eight none has fewer than 6.
    assert set(pruned) == {
        *(CaptureKey("default", 16, (4, copies)) for copies in (1, 2)),
        *(CaptureKey("default", 4, (8, copies)) for copies in (1, 2)),
    }
    assert pruned[CaptureKey("default", 4, (8, 1))] == "one item has at least 6 tokens"
    assert pruned[CaptureKey("default", 16, (4, 1))] == "no 3 items of 1 to 2 tokens make 9 to 16 tokens"
    assert planned.num_graphs == 8
    manager.capture()
    assert captures(manager) == {c.key for c in planned.captures} - set(pruned)
    assert_serves(manager, items(model, (2,), (2,), (2,), (7,), (8,), keys=[(4, 1)] * 3 + [(8, 2)] * 2))
    assert manager.stats().hits == 5


@settings(max_examples=100)
@given(
    st.tuples(st.integers(1, 30), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))),
    st.lists(st.integers(3, 40), min_size=1, max_size=5, unique=True).map(sorted),
    st.integers(1, 3),
    st.data(),
)
def test_a_pruned_budget_would_never_have_been_the_smallest_that_fits(
    token_range: tuple[int, int], budgets: list[int], max_items: int, data: st.DataObject
) -> None:
    model = Ranged()
    model.ranges = {4: token_range, 8: token_range}
    manager = make(model, token_budgets=tuple(budgets), max_items_per_batch=max_items)
    kept = [
        c.key.budget
        for c in manager.planned_captures().captures
        if c.pruned is None and c.key.axis_keys == (4, 1)
    ]
    sizes = data.draw(st.lists(st.integers(*token_range), min_size=1, max_size=max_items))
    smallest = next((budget for budget in budgets if budget >= sum(sizes)), None)
    assert next((budget for budget in kept if budget >= sum(sizes)), None) == smallest


class Refusing(AxesModel):
    """It cannot make inputs for one of its combinations, or for small budgets, or for large ones."""

    def __init__(self, refuse: Any) -> None:
        super().__init__()
        self.refuse = refuse

    def made(self, values: dict[str, Any], budget: int | None = None) -> dict[str, Any]:
        keys = values["patches"].shape[1], len(values["copies"])
        if budget is not None and self.refuse(budget, keys):
            raise ValueError(f"{budget} tokens of {keys} make no grid")
        return values


REFUSALS = {
    "a combination": (lambda budget, keys: keys == (8, 2), {(4, (8, 2)), (8, (8, 2)), (16, (8, 2))}),
    "small budgets": (lambda budget, keys: budget < 8, {(4, keys) for keys in COMBINATIONS}),
    "large budgets": (
        lambda budget, keys: budget > 8 and keys[0] == 4,
        {(16, keys) for keys in COMBINATIONS if keys[0] == 4},
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_vllm_58122_what_the_tower_cannot_make_is_left_out_and_the_rest_serves(case: str) -> None:
    refuse, missing = REFUSALS[case]
    model = Refusing(refuse)
    manager = captured(model, token_budgets=(4, 8, 16))
    every = {(budget, keys) for budget in (4, 8, 16) for keys in COMBINATIONS}
    assert {(key.budget, key.axis_keys) for key in captures(manager)} == every - missing
    said = str(manager.planned_captures()) + "\n".join(manager.reports)
    for budget, keys in missing:
        assert f"{budget} tokens of {keys} make no grid" in said
    assert_serves(manager, items(model, (3,), (7,), (8,), (9,), keys=[(8, 2), (4, 1), (8, 2), (4, 2)]))
    missed = manager.stats().misses.get(fx.MissReason.NOT_CAPTURED, 0)
    assert missed == {"a combination": 2, "small budgets": 0, "large budgets": 1}[case]


def test_captures_and_their_bytes_are_known_before_anything_is_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = make(AxesModel())
    planned = manager.planned_captures()
    assert not manager.is_captured()
    assert not captures(manager)
    assert planned.num_graphs == len(planned.captures) == len(BUDGETS) * len(COMBINATIONS)
    for capture in planned.captures:
        columns, copies = capture.key.axis_keys
        # float32 patches, int64 item numbers, float32 copies
        assert capture.input_bytes == capture.key.budget * (4 * columns + 8) + 4 * copies
    summary, header, _, *rows = str(planned).splitlines()
    assert summary == "8 captures, 0.0 MiB of static inputs"
    assert header.split() == "path budget axis 0 axis 1 input MiB".split()
    assert len(rows) == 8
    assert rows[0].split() == ["default", "4", "4", "1", "0.00", "captured"]
    with caplog.at_level(logging.INFO, "fxsplit_encoder.manager"):
        manager.capture()
    assert summary in caplog.text
    assert captures(manager) == {CaptureKey("default", b, keys) for b in BUDGETS for keys in COMBINATIONS}
    assert set(manager.stats().budgets) == captures(manager)
    assert manager.budget_graphs["default"][4].axis_keys == COMBINATIONS[0]


@pytest.mark.parametrize("keys", [(4,), (4, 1, 1), 4, "41", None])
def test_a_tower_must_give_one_key_an_axis(keys: Any) -> None:
    class OtherKeys(AxesModel):
        def select_encoder_cudagraph_items(self, *args: Any) -> dict[str, Any]:
            selected = super().select_encoder_cudagraph_items(*args)
            del selected["encoder_cudagraph_axis_keys"]
            return selected if keys is None else selected | {"encoder_cudagraph_axis_keys": keys}

    model = OtherKeys()
    expected = re.escape(f"gave {keys!r} as 'encoder_cudagraph_axis_keys'; expected a tuple of 2")
    if keys is None:
        expected = "gave no 'encoder_cudagraph_axis_keys'; a tower with capture_axes"
    for enabled in (True, False):
        with pytest.raises(InputError, match=expected):
            make(model, enabled=enabled).execute(items(model, (3,), keys=[(4, 1)]))
