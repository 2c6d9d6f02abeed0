"""Whole models, as engines hand them over: a tower, what joins it to a language model, and that model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.manager.tower import tower_part, tower_tensors

from . import managers
from .mock_towers import WIDTH, SplitModel, UntraceableModel

pytestmark = pytest.mark.usefixtures("traced_once")


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


@pytest.fixture(params=NAMED)
def named(request: pytest.FixtureRequest) -> dict[str, Any]:
    return NAMED[request.param]


def captured(model: Any, named: dict[str, Any]) -> fx.EncoderCudaGraphManager:
    for name, value in named.items():
        setattr(model, name, value)
    return managers.captured(model, token_budgets=(8,), debug=False)


@pytest.mark.parametrize("make", [WholeSplit, WholeUntraceable])
def test_captures_hold_what_they_read_and_nothing_of_the_language_model(make: Any, named: Any) -> None:
    manager = captured(make(), named)
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
