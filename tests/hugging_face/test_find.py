"""Which towers a model has, and what the model reads of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.hugging_face.calls import is_named
from fxsplit_encoder.hugging_face.lifecycle import find_towers

from .models import MODELS, TOWER


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_one_tower(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name].kind(MODELS[name].config())
    (found,), refusals = find_towers(model)
    assert is_named(found.module)
    assert not refusals
    assert model.get_submodule(found.name) is found.module
    assert find_towers(torch.compile(model)) == ([found], [])


class Tuned(transformers.CLIPVisionModel):
    """Of a class that nobody registered."""


@pytest.mark.parametrize("kind", [transformers.CLIPVisionModel, Tuned])
def test_a_model_that_is_a_tower_is_found(kind: Any) -> None:
    model = kind(transformers.CLIPVisionConfig(**TOWER))
    (found,), _ = find_towers(model)
    assert (found.name, found.module) == ("", model)


@torch.no_grad()
def test_two_towers_of_a_model_are_both_accelerated() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            towers = (transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)) for _ in "12")
            self.first, self.second = towers
            self.same = self.first

    model = Two().eval()
    assert [found.name for found in find_towers(model)[0]] == ["first", "second"]
    pixels = torch.randn(1, 3, 16, 16)
    expected = [tower(pixels).pooler_output for tower in (model.first, model.second)]
    fx.accelerate(model, {"enabled": False})
    for tower, value in zip((model.same, model.second), expected, strict=True):
        torch.testing.assert_close(tower(pixels).pooler_output, value, rtol=0, atol=1e-5)
    assert fx.stats(model).items == 2
    fx.restore(model)
    assert "forward" not in vars(model.first)
