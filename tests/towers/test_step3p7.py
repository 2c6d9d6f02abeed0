"""Step-3.7's tower against the model library's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Model, Step3p7VisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.towers.step3p7 import Step3p7Tower

from .random_weights import randomize
from .two_views import Crops, Family, ServedViewTests, assert_items

# Whole images have 8 x 8 patches and crops 5 x 5, which the convolutions halve to an odd side.
SIZE, CROP, PATCH = 32, 20, 4


def make_tower(seed: int = 5) -> Step3p7VisionModel:
    config = Step3p7VisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=PATCH,
        mlp_ratio=1.5,
    )
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


def make_inputs(crops: list[Crops], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    counts = [columns * rows for columns, rows in crops]
    inputs: dict[str, Any] = {
        "pixel_values": torch.randn(len(crops), 3, SIZE, SIZE, generator=generator),
        "num_local_patches": counts,
    }
    if sum(counts):
        inputs["pixel_values_local"] = torch.randn(sum(counts), 3, CROP, CROP, generator=generator)
    return inputs


@torch.no_grad()
def library(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """What the model library makes of the images."""
    if not len(inputs["pixel_values"]):
        return []
    output = Step3p7Model.get_image_features(model, **inputs)  # type: ignore[arg-type]
    return list(output.pooler_output)


@pytest.fixture(scope="module")
def family() -> Family:
    model = Model()
    reference = copy.deepcopy(model)
    wrapped = Step3p7Tower(model, crop_size=CROP)

    def expected(inputs: dict[str, Any]) -> list[Tensor]:
        reference.vision_model.load_state_dict(wrapped.tower.state_dict())
        return library(reference, inputs)

    return Family(wrapped, make_inputs, expected, lambda output: output.last_hidden_state)


@pytest.mark.slow
@pytest.mark.exhaustive  # its kind: Step3's and DeepSeek-OCR's towers are served in these ways in any run
class TestStep3p7(ServedViewTests):
    pass


def test_images_are_those_of_the_model_library(family: Family) -> None:
    manager = fx.EncoderCudaGraphManager(family.wrapped, fx.EncoderConfig(mode="none"))
    for crops in ([(0, 0), (2, 2), (1, 2)], [(3, 3), (0, 0)]):
        inputs = family.make_inputs(crops, len(crops))
        assert_items(manager.execute(inputs), family.expected(inputs))


@torch.no_grad()
def test_the_forward_is_that_of_the_vision_model(family: Family) -> None:
    reference = make_tower()
    for size in (SIZE, CROP, 24):
        tiles = torch.randn(2, 3, size, size)
        output, expected = family.wrapped(tiles), reference(tiles)
        assert type(output) is type(expected)
        torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state, rtol=0, atol=1e-5)
    options = family.wrapped(tiles, output_hidden_states=True)
    assert len(options.hidden_states) == len(reference(tiles, output_hidden_states=True).hidden_states)


@torch.no_grad()
def test_a_vision_model_alone_gives_its_own_features() -> None:
    reference = make_tower()
    wrapped = Step3p7Tower(make_tower(), crop_size=CROP)
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(mode="none"))
    inputs = make_inputs([(0, 0), (2, 1)], 0)
    whole = reference(inputs["pixel_values"]).last_hidden_state
    crops = reference(inputs["pixel_values_local"]).last_hidden_state
    assert_items(manager.execute(inputs), [whole[0], torch.cat((*crops, whole[1]))])


def test_without_counts_no_image_has_crops(family: Family) -> None:
    inputs = {"pixel_values": torch.randn(2, 3, SIZE, SIZE)}
    specs = family.wrapped.get_encoder_cudagraph_item_specs(inputs)
    assert [spec.path_output_tokens for spec in specs] == 2 * [{"global": 4, "local": 0}]


def test_tokens_of_the_published_model() -> None:
    with torch.device("meta"):
        tower = Step3p7VisionModel(Step3p7VisionConfig())
    wrapped = fx.wrap(tower)
    assert isinstance(wrapped, Step3p7Tower)
    specs = wrapped.get_encoder_cudagraph_item_specs({"num_local_patches": torch.tensor([0, 6])})
    assert [(s.input_size, s.output_tokens) for s in specs] == [(2704, 169), (2704 + 6 * 1296, 169 + 6 * 81)]
    assert specs[1].path_output_tokens == {"global": 169, "local": 486}
    assert wrapped.get_encoder_cudagraph_config().out_hidden_size == 6144
