"""Models that are towers, or embed images by one: CLIP, SigLIP 1 and 2, DINOv2 and 3."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.planning import MissReason

from .comparisons import assert_close, assert_same_bits
from .test_models import num_captures, num_traces
from .tile_models import TOWER
from .tiny_model import randomize

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
DINO = {name: value for name, value in TOWER.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
NAFLEX = {name: value for name, value in TOWER.items() if name != "image_size"} | {"num_patches": 16}
SETTINGS = {"piece_compiler": "eager", "mode": "full", "exact_min_hits": 2}


def images(count: int, size: int = 16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(count, 3, size, size, generator=generator)}


def shapes(count: int, patches: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """As SigLIP 2's processor makes them: patches up to a number, a mask, rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([(4, 4), (3, 4), (5, 3), (2, 7)])[:count]
    own = torch.arange(patches)[None] < sizes.prod(1)[:, None]
    pixels = torch.randn(count, patches, 48, generator=generator) * own[..., None]
    return {"pixel_values": pixels, "pixel_attention_mask": own.int(), "spatial_shapes": sizes}


# Class, its configuration's class and sizes, and how its inputs are made.
MODELS: dict[str, tuple[str, dict[str, Any], Callable[..., dict[str, Tensor]]]] = {
    "CLIPModel": ("CLIPConfig", {"text_config": TEXT, "vision_config": TOWER, "projection_dim": 24}, images),
    "SiglipModel": ("SiglipConfig", {"text_config": TEXT, "vision_config": TOWER}, images),
    "Siglip2Model": ("Siglip2Config", {"text_config": TEXT, "vision_config": NAFLEX}, shapes),
    "Dinov2Model": ("Dinov2Config", DINO, images),
    "DINOv3ViTModel": ("DINOv3ViTConfig", {**TOWER, "num_register_tokens": 2}, images),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any, Path]]:
    """`models(name)`: accelerated and warmed up, untouched, and their checkpoint."""
    made: dict[str, tuple[Any, Any, Path]] = {}

    def make(name: str) -> tuple[Any, Any, Path]:
        if name not in made:
            kind, sizes, _ = MODELS[name]
            directory = tmp_path_factory.mktemp(name)
            model = getattr(transformers, name)(getattr(transformers, kind)(**sizes))
            randomize(model)
            model.save_pretrained(directory)
            first, second = (getattr(transformers, name).from_pretrained(directory).eval() for _ in range(2))
            fx.accelerate(first, SETTINGS)
            assert fx.warmup(first) > 0
            made[name] = first, second, directory
        return made[name]

    return make


def embed(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    if hasattr(model, "get_image_features"):
        return model.get_image_features(**inputs, **options)
    return model(**inputs, **options)


@every_model
@torch.no_grad()
def test_embeddings_are_those_of_the_model(name: str, models: Any) -> None:
    model, reference, _ = models(name)
    for count in (1, 3, 2):
        inputs = MODELS[name][2](count, seed=count)
        assert_close(embed(model, inputs), embed(reference, inputs))
    stats = fx.stats(model)
    assert (stats.hits, stats.misses) == (3, {})


@every_model
def test_after_a_warm_up_nothing_is_traced_or_captured(name: str, models: Any) -> None:
    model, _, _ = models(name)
    before = num_traces(), num_captures(model)
    for context in (torch.no_grad, torch.inference_mode):
        for count in (1, 3):
            with context():
                embed(model, MODELS[name][2](count))
    assert (num_traces(), num_captures(model)) == before


@every_model
@torch.no_grad()
def test_saved_and_restored_it_is_the_model(name: str, models: Any, tmp_path: Path) -> None:
    model, reference, _ = models(name)
    model.save_pretrained(tmp_path)
    saved = getattr(transformers, name).from_pretrained(tmp_path).eval()
    assert_same_bits(saved.state_dict(), reference.state_dict())
    inputs = MODELS[name][2](2)
    restored = fx.restore(copy.deepcopy(model))
    assert_same_bits(embed(restored, inputs), embed(reference, inputs))


@every_model
@torch.no_grad()
def test_hidden_states_are_the_towers_own(name: str, models: Any) -> None:
    model, reference, _ = models(name)
    inputs = MODELS[name][2](2)
    got, expected = (embed(each, inputs, output_hidden_states=True) for each in (model, reference))
    assert_close(got, expected)
    assert len(got.hidden_states) == 3


@torch.no_grad()
def test_images_of_another_size_are_captured_once_they_recur(models: Any) -> None:
    """DINOv2's checkpoints name another size than their processor gives."""
    _, reference, directory = models("Dinov2Model")
    model = fx.accelerate(type(reference).from_pretrained(directory).eval(), SETTINGS)
    for number in range(3):
        inputs = images(2, 24, seed=number)
        assert_close(model(**inputs), reference(**inputs))
    stats = fx.stats(model)
    assert (stats.hits, stats.misses) == (2, {MissReason.NEW_SHAPE: 1})


@torch.no_grad()
def test_a_warm_up_by_example_captures_its_size(models: Any) -> None:
    _, reference, directory = models("Dinov2Model")
    model = fx.accelerate(type(reference).from_pretrained(directory).eval(), SETTINGS)
    assert fx.warmup(model, **images(1, 20)) > 0
    before = num_traces()
    inputs = images(3, 20)
    assert_close(model(**inputs), reference(**inputs))
    assert (num_traces(), fx.stats(model).misses) == (before, {})


@torch.no_grad()
def test_positions_are_interpolated_where_that_is_asked_for(models: Any) -> None:
    _, reference, directory = models("CLIPModel")
    model = fx.accelerate(type(reference).from_pretrained(directory).eval(), SETTINGS)
    for number in range(2):
        inputs = images(1, 24, seed=number)
        got, expected = (embed(each, inputs, interpolate_pos_encoding=True) for each in (model, reference))
        assert_close(got, expected)
    with pytest.raises(ValueError, match="Input image size"):
        embed(model, images(1, 24))
    assert fx.stats(model).hits == 1


@torch.no_grad()
def test_a_pipeline_embeds_as_before(models: Any, example_image: Any) -> None:
    model, reference, _ = models("Dinov2Model")
    processor = transformers.BitImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    features = [
        transformers.pipeline("image-feature-extraction", model=each, image_processor=processor)(
            example_image
        )
        for each in (model, reference)
    ]
    assert_close(torch.tensor(features[0]), torch.tensor(features[1]))
