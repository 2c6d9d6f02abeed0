"""Which parameters replays look at and how often, and that a look then sees what happened since the last."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.capture.breakable import eager_break_during_capture
from fxsplit_encoder.manager.tower import tower_part, tower_tensors
from fxsplit_encoder.runtime import requests
from fxsplit_encoder.runtime.requests import WeightChecks

from . import managers
from .mock_towers import WIDTH, SplitModel, UntraceableModel, alone, assert_equal_items, assert_serves, batch

pytestmark = pytest.mark.usefixtures("traced_once")
captured = functools.partial(managers.captured, token_budgets=(8,), debug=False)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: self.now))


def replace_weight(model: SplitModel) -> None:
    model.linear.weight = nn.Parameter(model.linear.weight + 1, requires_grad=False)


def test_paths_look_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, checks = Clock(monkeypatch), WeightChecks(2)
    assert [checks.is_due(path) for path in ("a", "b", "a", "b")] == [True, True, False, False]
    clock.now += 1
    checks.all_are_due()
    assert [checks.is_due(path) for path in ("a", "a")] == [True, False]
    clock.now += 2
    assert checks.is_due("a")


@pytest.mark.parametrize("how", ["by time", "told", "debug"])
def test_what_moved_serves_until_the_next_look(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    clock, model = Clock(monkeypatch), SplitModel()
    manager, inputs = captured(model, weight_check_seconds=5, debug=how == "debug"), batch(2, 3)
    manager.execute(inputs)
    old = alone(model, inputs)
    replace_weight(model)
    assert not torch.equal(alone(model, inputs)[0], old[0])
    if how != "debug":  # which looks at every replay
        clock.now += 4
        assert_equal_items(manager.execute(inputs), old)
    if how == "told":
        manager.check_weights()
    elif how == "by time":
        clock.now += 1
    assert_serves(manager, inputs)
    assert manager.stats().misses == {}


def test_what_was_found_wrong_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(monkeypatch), SplitModel()
    manager, inputs = captured(model, weight_check_seconds=5), batch(2, 3)
    manager.execute(inputs)
    weight = model.linear.weight
    model.linear.weight = nn.Parameter(weight.double(), requires_grad=False)  # no capture can be made of it
    clock.now += 5
    for _ in range(2):
        with pytest.raises(fx.InputError, match="parameters: expected them"):
            manager.execute(inputs)
    model.linear.weight = weight
    assert_serves(manager, inputs)


def test_a_look_that_a_failed_replay_owed_is_made_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    failing: list[str] = []

    @eager_break_during_capture
    def passed(out: Tensor) -> Tensor:
        if failing:
            raise ValueError(failing[0])
        return out

    class BreaksInTheMiddle(SplitModel):
        def encoder_cudagraph_forward(self, inputs: dict[str, Any], path: str = "default") -> Tensor:
            return passed(super().encoder_cudagraph_forward(inputs, path)) * 1.0

    clock, model = Clock(monkeypatch), BreaksInTheMiddle()
    manager, inputs = captured(model, mode="breakable", weight_check_seconds=5), batch(2, 3)
    manager.execute(inputs)
    replace_weight(model)
    clock.now += 5
    failing.append("half-way")
    with pytest.raises(ValueError, match="half-way"):
        manager.execute(inputs)
    failing.clear()
    assert_serves(manager, inputs)
    assert manager.stats().misses == {}


# --- whole models, as engines hand them over: a tower, what joins it to a language model, and that model


class WholeModel:
    """Mixed into a packed model, whose `linear` is its tower. `adapter` is used and never named, `newline` is
    the model's own, and the language model comes first.
    """

    def __init__(self) -> None:
        super().__init__()
        tower = self.linear  # type: ignore[has-type]
        del self.linear
        self.language_model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)))
        self.linear = tower
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.newline = nn.Parameter(torch.randn(WIDTH))
        self.requires_grad_(False)  # type: ignore[attr-defined]

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        output = super().encoder_cudagraph_forward(inputs, path)  # type: ignore[misc]
        return self.adapter(output) + self.newline  # type: ignore[no-any-return]


class WholeSplit(WholeModel, SplitModel): ...


class WholeUntraceable(WholeModel, UntraceableModel): ...


NAMED: dict[str, dict[str, Any]] = {
    "attribute": {"_tower_model_names": ["linear"]},
    "mapping": {
        "_tower_model_names": ["audio_tower"],  # of a second tower, which took the place of the first's name
        "get_mm_mapping": lambda: SimpleNamespace(tower_model=["linear."], connector=["audio_projector"]),
    },
}


@pytest.mark.parametrize("make", [WholeSplit, WholeUntraceable])
@pytest.mark.parametrize("named", NAMED)
def test_captures_hold_what_they_read_and_nothing_of_the_language_model(make: Any, named: str) -> None:
    model = make()
    for name, value in NAMED[named].items():
        setattr(model, name, value)
    manager = captured(model)
    read = {"linear.weight", "linear.bias", "adapter.weight", "adapter.bias", "newline"}
    assert set(manager.paths["default"].captured[8].parameters.names) == read


def test_a_model_that_names_nothing_is_all_tower() -> None:
    for names in ([], ["visual"], ["linear.weight"]):
        model = WholeUntraceable()
        model._tower_model_names = names
        assert tower_part(model) is model
        assert len(tower_tensors(model)) == len(list(model.parameters()))
    assert tower_part(object()) is None
    assert tower_tensors(object()) == []


def test_a_part_of_a_part_counts_once() -> None:
    model = nn.ModuleDict({"visual": nn.Sequential(nn.Linear(2, 2)), "visual2": nn.Linear(2, 2)})
    names = SimpleNamespace(tower_model=["visual."], connector=["visual.0", "visual2"])
    model.get_mm_mapping = lambda: names  # type: ignore[assignment]
    part = tower_part(model)
    assert part is not None
    assert list(part) == [model["visual"], model["visual2"]]  # type: ignore[call-overload]
    assert len(tower_tensors(model)) == 4
