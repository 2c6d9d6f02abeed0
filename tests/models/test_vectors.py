"""The models' own vectors of images and texts are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import load_tower, read_family
from fxsplit_encoder.models.text import TextEncoder, Tokenizer

from .checkpoints import CPU, save
from .embedding_models import MODELS, WITH_TEXT, image_vector, save_model, text_vectors

IMAGES = [Image.effect_noise((40 + 9 * n, 50), 60).convert("RGB") for n in range(3)]


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save_model(tmp_path_factory.mktemp("model"), request.param)


def inputs_of(model: Any, image: Image.Image, prepared: Any) -> dict[str, torch.Tensor]:
    if type(model).__name__ != "Siglip2Model":
        return {"pixel_values": prepared.tensors["pixel_values"]}
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    processor = Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16)
    return dict(processor(images=[image], return_tensors="pt"))


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["as it is", "compiled"]
)
def test_the_vector_of_an_image_is_that_of_transformers(saved: tuple[Any, Path], compiled: bool) -> None:
    model, directory = saved
    checkpoint = Checkpoint.locate(directory)
    family, settings = read_family(checkpoint)
    assert family.pooled is not None
    tower = family.pooled.wrap(load_tower(checkpoint, torch.float32, CPU, family.pooled))
    config = fx.EncoderConfig(mode="none", piece_compiler="eager", enabled=compiled)
    manager = fx.EncoderCudaGraphManager(tower, config)
    manager.capture()
    preparation = family.prepare(settings, checkpoint.processors())
    prepared = [preparation.image(image) for image in IMAGES]
    names = prepared[0].tensors.keys()
    found = manager.execute({name: torch.cat([each.tensors[name] for each in prepared]) for name in names})
    for image, each, vector in zip(IMAGES, prepared, found, strict=True):
        expected = image_vector(model, inputs_of(model, image, each))
        torch.testing.assert_close(vector, expected, rtol=0, atol=1e-5)
        sizes = preparation.image_sizes(*image.size)
        assert sizes.layout == each.layout


def test_rows_are_those_of_patches(saved: tuple[Any, Path]) -> None:
    model, directory = saved
    checkpoint = Checkpoint.locate(directory)
    family, settings = read_family(checkpoint)
    tower = family.wrap(load_tower(checkpoint, torch.float32, CPU))
    prepared = family.prepare(settings, checkpoint.processors()).image(IMAGES[0])
    rows = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(enabled=False)).execute(dict(prepared.tensors))
    vision = getattr(model, "vision_model", model)
    with torch.no_grad():
        expected = vision(**inputs_of(model, IMAGES[0], prepared)).last_hidden_state[0]
    if family.pads_rows:
        _, height, width = prepared.layout["grid"]
        torch.testing.assert_close(rows[0][: height * width], expected[: height * width], rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(rows[0], expected[-4:], rtol=0, atol=1e-5)


def test_tiles_may_have_another_side_than_the_table_of_positions(tmp_path: Path) -> None:
    """As published DINOv2 models do, whose processor crops to 224 pixels where the table is of 518."""
    model, directory = save_model(tmp_path, "Dinov2")
    (directory / "preprocessor_config.json").write_text('{"crop_size": {"height": 42, "width": 42}}')
    checkpoint = Checkpoint.locate(directory)
    family, settings = read_family(checkpoint)
    prepared = family.prepare(settings, checkpoint.processors()).image(IMAGES[0])
    assert prepared.tensors["pixel_values"].shape[-1] == 42
    for own in (family, family.pooled):
        assert own is not None
        tower = own.wrap(load_tower(checkpoint, torch.float32, CPU, own), 42)
        manager = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(mode="none", piece_compiler="eager"))
        manager.capture()
        (found,) = manager.execute(dict(prepared.tensors))
        with torch.no_grad():
            expected = model(prepared.tensors["pixel_values"])
        whole = expected.pooler_output if own is family.pooled else expected.last_hidden_state[0, 1:]
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", WITH_TEXT)
def test_vectors_of_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, directory = save_model(tmp_path, name)
    checkpoint = Checkpoint.locate(directory)
    texts = ["a photo of a cat", "rocket", "the dog with two cups of coffee " * 4, ""]
    tokenizer = Tokenizer(checkpoint)
    encode = TextEncoder(checkpoint, torch.float32, CPU, tokenizer.padding_id)
    tokens = [tokenizer(text) for text in texts]
    assert max(map(len, tokens)) == 12
    found = encode(tokens)
    torch.testing.assert_close(found, text_vectors(model, directory, texts), rtol=0, atol=1e-5)
    for text, vector in zip(tokens, found, strict=True):  # each as alone
        torch.testing.assert_close(encode([text])[0], vector, rtol=0, atol=1e-5)


def test_a_model_without_a_text_tower_is_refused(tmp_path: Path) -> None:
    _, directory = save(tmp_path / "tower", "qwen2_5_vl")
    with pytest.raises(InputError, match="without a text tower"):
        Tokenizer(Checkpoint.locate(directory))
    _, directory = save_model(tmp_path / "siglip", "Siglip")
    for file in directory.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InputError, match="tokenizer cannot be loaded"):
        Tokenizer(Checkpoint.locate(directory))


def test_a_tower_alone_has_a_vector_without_the_projection(tmp_path: Path) -> None:
    _, directory = save(tmp_path / "tower", "clip_vision_model")
    checkpoint = Checkpoint.locate(directory)
    pooled = read_family(checkpoint)[0].pooled
    assert pooled is not None
    assert pooled.wrap(load_tower(checkpoint, torch.float32, CPU, pooled)).out_hidden_size == 16
