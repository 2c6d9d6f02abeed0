from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.llama4.modeling_llama4 import Llama4VisionModel, vision_apply_rotary_emb

import fxsplit_encoder as fx
from fxsplit_encoder.towers.grid import rotate_pairs

from .dense_models import assert_close, random_tiles
from .random_weights import randomize
from .tiny_tiles import llama4, llama4_sizes


def make(blocks: int = 2) -> Any:
    return randomize(llama4(blocks))


@torch.no_grad()
def test_rows_are_those_of_the_model() -> None:
    reference, x = make(), random_tiles(3)
    expected = reference.multi_modal_projector(reference.vision_model(x).last_hidden_state)
    assert_close([fx.wrap(make()).encoder_eager_forward({"pixel_values": x})], [expected.flatten(0, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_real_rotation_is_the_complex_one(dtype: torch.dtype) -> None:
    rotary, real = (model.vision_model.rotary_embedding for model in (make(), fx.wrap(make())))
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 17, 2, 16, generator=generator).to(dtype) for _ in range(2))
    expected = vision_apply_rotary_emb(query, key, rotary(query))
    cos, sin = real(query)
    assert_close([rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin)], expected, 1e-6)
    assert (expected[0] - query).abs().max() > 0.5


def test_a_cast_before_wrapping_leaves_the_angles_whole() -> None:
    """Casting a tower to 16 bits drops the imaginary part of Hugging Face's own table."""
    table, cast = (fx.wrap(make().to(dtype)).tower.rotary_embedding.table for dtype in (None, torch.float64))
    assert torch.equal(cast, table)
    assert table.dtype == torch.float32


@torch.no_grad()
def test_called_it_is_get_image_features() -> None:
    model = make()
    reference = copy.deepcopy(model)
    wrapped = fx.wrap(model)
    assert wrapped.tower is model.vision_model
    x = random_tiles(2)
    expected = reference.get_image_features(x, vision_feature_select_strategy="default")
    output = wrapped(x, vision_feature_select_strategy="default", return_dict=True)
    assert type(output) is type(expected)
    for got in (
        output,
        wrapped(pixel_values=x),
        model.get_image_features(x, vision_feature_select_strategy="full"),
    ):
        assert_close([got.last_hidden_state], [expected.last_hidden_state])


def test_the_parameters_keep_their_names() -> None:
    model = make()
    names = set(model.state_dict())
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = fx.wrap(model)
    assert set(model.state_dict()) == names
    model.load_state_dict(weights)
    fx.wrap(model)  # once more changes nothing
    assert {n.split(".")[0] for n, _ in wrapped.named_parameters()} == {
        "vision_model",
        "multi_modal_projector",
    }


def test_a_bare_tower_is_not_projected(fresh_dynamo: None) -> None:
    config = Llama4VisionConfig(**llama4_sizes())
    tower, reference = (randomize(Llama4VisionModel(config)) for _ in range(2))
    wrapped = fx.wrap(tower)
    assert wrapped.out_hidden_size == 24
    x = random_tiles(3)
    got = wrapped.encoder_eager_forward({"pixel_values": x})
    assert_close([got], [reference(x).last_hidden_state.flatten(0, 1)])


def test_ratios_count_tiles_and_given_counts_come_before_them() -> None:
    """An image of several tiles has the whole image as one more."""
    tower, ratios = fx.wrap(make()), {"aspect_ratios": torch.tensor([(1, 1), (2, 2), (1, 3)])}
    for given in ({}, {"patches_per_image": [2, 3, 5]}, {"num_patches": [2, 3, 5]}):
        specs = tower.get_encoder_cudagraph_item_specs({"pixel_values": random_tiles(10), **ratios, **given})
        assert [s.input_size for s in specs] == ([2, 3, 5] if given else [1, 5, 4])
