"""Step-3.7's tower against the model library's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Model, Step3p7VisionModel

from fxsplit_encoder.towers.step3p7 import Step3p7Tower

from .dense_models import assert_close, encoded
from .random_weights import randomize
from .tiny_inputs import ViewInputs, items

# Whole images have 8 x 8 patches and crops 5 x 5, which the convolutions halve to an odd side.
SIZE, CROP, PATCH = 32, 20, 4
KEYS = ("pixel_values", "pixel_values_local", "num_local_patches")
INPUTS = ViewInputs(*KEYS, whole_size=SIZE, crop_size=CROP, whole_tokens=4, crop_tokens=4)


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
