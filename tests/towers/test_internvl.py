from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.internvl.modeling_internvl import InternVLModel

import fxsplit_encoder as fx

from .dense_models import SHAPE, assert_close, random_tiles
from .random_weights import randomize
from .tiny_tiles import internvl_config, internvl_with_head

SMALL = {"attention_bias": True}
LARGE = {"norm_type": "rms_norm", "use_qk_norm": True}
"""The two sizes of the family differ in their norms and biases too."""


def make(vision: dict[str, Any] = SMALL, **options: Any) -> Any:
    return randomize(InternVLModel(internvl_config(vision, blocks=2, **options)))


@pytest.mark.parametrize("vision", [SMALL, LARGE], ids=["300M", "6B"])
@pytest.mark.parametrize("options", [{}, {"vision_feature_layer": -2}], ids=["all layers", "before the last"])
@torch.no_grad()
def test_rows_are_those_of_the_model(vision: Any, options: Any) -> None:
    x = random_tiles(3)
    expected = make(vision, **options).get_image_features(x).pooler_output.flatten(0, 1)
    assert_close([fx.wrap(make(vision, **options)).encoder_eager_forward({"pixel_values": x})], [expected])


@torch.no_grad()
def test_called_it_is_get_image_features() -> None:
    model = make()
    reference = copy.deepcopy(model)
    wrapped = fx.wrap(model)
    x = random_tiles(2)
    expected = reference.get_image_features(x)
    for output in (wrapped(x), wrapped(pixel_values=x), wrapped(x, vision_feature_layer=-1)):
        assert type(output) is type(expected)
        assert_close([output.pooler_output], [expected.pooler_output])
        assert_close([output.last_hidden_state], [expected.last_hidden_state])
    other = wrapped(x, vision_feature_layer=1).pooler_output
    assert_close([other], [reference.get_image_features(x, vision_feature_layer=1).pooler_output])
    assert (other - expected.pooler_output).abs().max() > 0.01


def test_only_what_surrounds_the_language_model_is_wrapped() -> None:
    model = randomize(internvl_with_head())
    text = model.model.language_model.config._attn_implementation
    wrapped = fx.wrap(model)
    names = {name.split(".")[0] for name, _ in wrapped.named_parameters()}
    assert names == {"vision_tower", "multi_modal_projector"}
    assert wrapped.tower is model.model.vision_tower
    assert isinstance(wrapped, fx.SupportsEncoderCudaGraph)
    assert wrapped.tower.config._attn_implementation == "sdpa"
    assert model.model.language_model.config._attn_implementation == text
    assert (wrapped.tokens_per_tile, wrapped.out_hidden_size, wrapped.tile_shape) == (4, 12, SHAPE)
