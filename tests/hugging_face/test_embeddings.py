"""Models that are towers, or embed images by one: images of other sizes than their configuration's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx

from .comparisons import assert_close
from .conftest import config_of
from .models import EMBEDDERS, embed
from .test_models import num_traces

UNTRACED: dict[str, Any] = {"compile": False, "piece_compiler": "auto"}


def images(count: int, size: int = 16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(count, 3, size, size, generator=generator)}


def pair(name: str, checkpoint: Callable[[str], Path], **settings: Any) -> list[Any]:
    """A model that is accelerated and nothing else, and one as it was loaded."""
    tiny = EMBEDDERS[name]
    model, reference = (tiny.load(checkpoint(name)) for _ in range(2))
    return [fx.accelerate(model, config_of(tiny).replace(**settings)), reference]


@torch.no_grad()
def test_a_warm_up_by_example_captures_its_size(checkpoint: Callable[[str], Path]) -> None:
    model, reference = pair("dinov2", checkpoint)
    assert fx.warmup(model, **images(1, 20)) > 0
    before = num_traces()
    inputs = images(3, 20)
    assert_close(model(**inputs), reference(**inputs))
    assert (num_traces(), fx.stats(model).misses) == (before, {})


@torch.no_grad()
def test_positions_are_interpolated_where_that_is_asked_for(checkpoint: Callable[[str], Path]) -> None:
    model, reference = pair("clip", checkpoint, **UNTRACED)
    for number in range(2):
        inputs = images(1, 24, seed=number)
        got, expected = (embed(each, inputs, interpolate_pos_encoding=True) for each in (model, reference))
        assert_close(got, expected)
    with pytest.raises(ValueError, match="Input image size"):
        embed(model, images(1, 24))
    assert fx.stats(model).hits == 1
