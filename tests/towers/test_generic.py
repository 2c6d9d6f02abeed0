"""Hugging Face's dense towers by a declaration: SigLIP, CLIP, DINOv2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
)

import fxsplit_encoder as fx
from fxsplit_encoder.towers.tiles import MASKED_ATTENTION_TAKES_UNKNOWN_SIZES

from .conformance import Case, assert_compiled_once
from .dense_models import SHAPE, BiasedTower, PlainTower, assert_close, random_tiles
from .random_weights import randomize
from .tiny_inputs import TileInputs

SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8)
CLASS_TOKEN = fx.DenseTowerSpec(SHAPE, 4, 16, rows=slice(1, None))


def siglip(**options: Any) -> Any:
    return randomize(SiglipVisionModel(SiglipVisionConfig(**SIZES, intermediate_size=24, **options)))


def clip(**options: Any) -> Any:
    return randomize(CLIPVisionModel(CLIPVisionConfig(**{**SIZES, "intermediate_size": 24, **options})))


def dinov2() -> Any:
    return randomize(Dinov2Model(Dinov2Config(**SIZES, mlp_ratio=2)))


TOWERS = {
    "siglip": (siglip, fx.DenseTowerSpec(SHAPE, 4, 16)),
    "clip": (clip, CLASS_TOKEN),
    "clip before its last layer": (
        clip,
        fx.DenseTowerSpec(
            SHAPE,
            4,
            16,
            output=lambda result: result.hidden_states[-2],
            rows=slice(1, None),
            options={"output_hidden_states": True},
        ),
    ),
    "dinov2": (dinov2, CLASS_TOKEN),
}


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_rows_are_those_that_the_declaration_names(name: str) -> None:
    make, spec = TOWERS[name]
    x = random_tiles(3)
    result = make()(x, **spec.options)
    output = spec.output(result) if callable(spec.output) else result[spec.output]
    got = fx.wrap(make(), spec).encoder_eager_forward({"pixel_values": x})
    assert_close([got], [output[:, spec.rows].flatten(0, 1)])


@pytest.mark.slow
def test_a_convolution_over_any_number_of_images_through_inductor() -> None:
    case = Case("clip", fx.wrap(clip(num_hidden_layers=1), CLASS_TOKEN), TileInputs())
    assert_compiled_once(case, piece_compiler="inductor")


@torch.no_grad()
def test_attention_with_a_bias_of_each_image(fresh_dynamo: None) -> None:
    tower = randomize(BiasedTower())
    spec = fx.DenseTowerSpec(SHAPE, 4, 16, output=lambda result: result["features"], attends_with_mask=True)
    wrapped = fx.wrap(tower, spec)
    compiled = torch.compile(
        wrapped, backend="encoder_cg", options={"token_budgets": [4, 16], "debug": True}, fullgraph=True
    )
    for count in (1, 2, 3, 4, 1):
        x = random_tiles(count, seed=count)
        torch.testing.assert_close(compiled(x)["features"], tower(x)["features"], rtol=0, atol=1e-5)
    apart = not MASKED_ATTENTION_TAKES_UNKNOWN_SIZES  # a single image is traced apart
    assert counters["stats"]["unique_graphs"] == 1 + apart
    assert not counters["graph_break"]


def test_images_under_another_name() -> None:
    spec = fx.DenseTowerSpec(SHAPE, 5, 16, output=lambda r: r["features"], input_name="images")
    tower = randomize(PlainTower())
    wrapped = fx.wrap(tower, spec)
    config = fx.EncoderConfig(token_budgets=(10,), mode="breakable")
    manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
    manager.capture()
    x = random_tiles(2)
    assert_close(manager.execute({"images": x}), list(tower(x)["features"]))
    assert manager.stats().hits == 2
    torch.testing.assert_close(wrapped(images=x)["features"], tower(x)["features"], rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "hidden"), [(5, 16), (4, 8)])
def test_a_spec_that_does_not_describe_the_output_is_refused(tokens: int, hidden: int) -> None:
    wrapped = fx.wrap(clip(), fx.DenseTowerSpec(SHAPE, tokens, hidden, rows=slice(1, None)))
    with pytest.raises(
        fx.InputError, match=rf"expected features of \(tiles, {tokens}, {hidden}\); got \(1, 4, 16"
    ):
        wrapped.encoder_eager_forward({"pixel_values": random_tiles(1)})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (((3, 16), 4, 4), "image_shape"),
        (((3, 0, 16), 4, 4), "image_shape"),
        ((SHAPE, 0, 4), "tokens_per_image"),
        ((SHAPE, 4, -1), "hidden_size"),
    ],
)
def test_impossible_specs(arguments: Any, name: str) -> None:
    with pytest.raises(fx.InputError, match=rf"DenseTowerSpec.{name}: expected positive sizes"):
        fx.DenseTowerSpec(*arguments)
