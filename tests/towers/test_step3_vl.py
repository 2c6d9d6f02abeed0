"""Step3's tower against its formulas in float64; Step-3.7's against the model library's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Model, Step3p7VisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.encoders.step3_vision import Step3VisionModel
from fxsplit_encoder.towers.cropped import Step3p7Tower

from .dense_models import assert_close, encoded
from .random_weights import randomize
from .tiny_inputs import ViewInputs, items
from .tiny_towers import tiny
from .tiny_views import step3_config, step3p7_sizes

CONFIG = step3_config(layers=2)


def reference(tensors: Mapping[str, Tensor], tiles: Tensor) -> Tensor:
    """(tiles, rows, out_hidden_size)."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, CONFIG.layer_norm_eps)

    prefix = "vision_model.embeddings"
    kernel = weights[f"{prefix}.patch_embedding.weight"]
    patches = F.unfold(tiles.double(), kernel.shape[-1], stride=kernel.shape[-1]).transpose(1, 2)
    x = patches @ kernel.flatten(1).T + weights[f"{prefix}.patch_embedding.bias"]
    side = int(x.shape[1] ** 0.5)
    table = weights[f"{prefix}.position_embedding.weight"]
    stored = int((table.shape[0] - 1) ** 0.5)
    grid = table[1:].T.unflatten(1, (stored, stored))[None]
    x = x + F.interpolate(grid, size=side, mode="bicubic", antialias=True)[0].flatten(1).T
    first = (weights[f"{prefix}.class_embedding"] + table[:1]).expand(x.shape[0], -1, -1)
    x = torch.cat((first, first, first, first, x), dim=1)
    for layer in range(CONFIG.num_hidden_layers):
        prefix = f"vision_model.transformer.layers.{layer}"
        qkv = linear(x, f"{prefix}.self_attn.qkv_proj").unflatten(-1, (3, CONFIG.num_attention_heads, -1))
        heads = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        attended = linear(heads.transpose(1, 2).flatten(2), f"{prefix}.self_attn.out_proj")
        x = x + norm(attended, f"{prefix}.layer_norm1")
        hidden = linear(x, f"{prefix}.mlp.fc1")
        x = x + norm(
            linear(hidden / (1 + (-1.702 * hidden).exp()), f"{prefix}.mlp.fc2"), f"{prefix}.layer_norm2"
        )
    grid = x[:, 4:].transpose(1, 2).unflatten(2, (side, side))
    for name, padding in (("vit_downsampler", 0), ("vit_downsampler2", 1)):
        grid = F.conv2d(grid, weights[f"{name}.weight"], weights[f"{name}.bias"], stride=2, padding=padding)
    return linear(grid.flatten(2).transpose(1, 2), "vit_large_projector")


@pytest.mark.parametrize("crops", [[(0, 0)], [(0, 0), (2, 2), (1, 2)], [(3, 3), (0, 0)]], ids=str)
@torch.no_grad()
def test_vllm_42224_vllm_46034_images_equal_the_reference(crops: Any) -> None:
    wrapped = fx.wrap(randomize(Step3VisionModel(CONFIG)))
    inputs = tiny("Step3VisionModel").inputs.make(items("image", crops))
    own = reference(wrapped.tower.state_dict(), inputs["patch_pixel_values"])
    whole = reference(wrapped.tower.state_dict(), inputs["pixel_values"])
    parts = zip(own.split(inputs["num_patches"].tolist()), whole, strict=True)
    assert_close(encoded(wrapped, inputs), [torch.cat((*crop, image)).float() for crop, image in parts])


def test_tiles_of_another_size_are_refused() -> None:
    model = Step3VisionModel(CONFIG)
    with pytest.raises(InputError, match="a size of 32 or 24; got"):
        model(torch.zeros(1, 3, 28, 28))


# --- Step-3.7


# Whole images have 8 x 8 patches and crops 5 x 5, which the convolutions halve to an odd side.
SIZE, CROP, PATCH = 32, 20, 4
KEYS = ("pixel_values", "pixel_values_local", "num_local_patches")
INPUTS = ViewInputs(*KEYS, whole_size=SIZE, crop_size=CROP, whole_tokens=4, crop_tokens=4)


def make_tower(seed: int = 5) -> Step3p7VisionModel:
    config = Step3p7VisionConfig(**step3p7_sizes(2) | {"image_size": SIZE, "patch_size": PATCH})
    tower = randomize(Step3p7VisionModel(config), seed)
    assert isinstance(tower, Step3p7VisionModel)
    return tower


class Model(nn.Module):
    """The parts of `Step3p7Model` that images go through."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_model = make_tower()
        self.multi_modal_projector = nn.Linear(128, 24, bias=False)
        randomize(self.multi_modal_projector)


@pytest.mark.parametrize("crops", [[(0, 0), (2, 2), (1, 2)], [(3, 3), (0, 0)], []], ids=str)
@torch.no_grad()
def test_images_are_those_of_the_model_library(crops: Any) -> None:
    model, inputs = Model(), INPUTS.make(items("image", crops))
    reference = copy.deepcopy(model)
    expected = []
    if crops:
        output = Step3p7Model.get_image_features(reference, **inputs)  # type: ignore[arg-type]
        expected = list(output.pooler_output)
    assert_close(encoded(Step3p7Tower(model, crop_size=CROP), inputs), expected)


@torch.no_grad()
def test_a_vision_model_alone_gives_its_own_features() -> None:
    reference, wrapped = make_tower(), Step3p7Tower(make_tower(), crop_size=CROP)
    for size in (SIZE, CROP, 24):
        tiles = torch.randn(2, 3, size, size)
        output, expected = wrapped(tiles), reference(tiles)
        assert type(output) is type(expected)
        assert_close([output.last_hidden_state], [expected.last_hidden_state])
    options = wrapped(tiles, output_hidden_states=True)
    assert len(options.hidden_states) == len(reference(tiles, output_hidden_states=True).hidden_states)
    inputs = INPUTS.make(items("image", [(0, 0), (2, 1)]))
    whole, crops = (reference(inputs[name]).last_hidden_state for name in KEYS[:2])
    assert_close(encoded(wrapped, inputs), [whole[0], torch.cat((*crops, whole[1]))])


def test_without_counts_no_image_has_crops() -> None:
    wrapped = Step3p7Tower(make_tower(), crop_size=CROP)
    specs = wrapped.get_encoder_cudagraph_item_specs({"pixel_values": torch.randn(2, 3, SIZE, SIZE)})
    assert [spec.path_output_tokens for spec in specs] == 2 * [{"global": 4, "local": 0}]
