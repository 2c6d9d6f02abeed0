"""Every family from a checkpoint and an image file to embeddings, at tiny sizes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

import fxsplit_encoder as fx
import fxsplit_encoder.models
from fxsplit_encoder.errors import InputError, MissingExtraError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.eager import as_tensors, share_weights
from fxsplit_encoder.models.load import load_tower, read_family
from fxsplit_encoder.models.prepare import ProcessorSettings, load_inputs
from fxsplit_encoder.models.random import demo_tower, random_inputs
from fxsplit_encoder.models.registry import ARCHITECTURES, FAMILIES, architecture
from fxsplit_encoder.models.text import TextEncoder, Tokenizer

from .checkpoints import CHECKPOINTS, CPU, clip, save
from .embedding_models import MODELS, WITH_TEXT, image_vector, save_model, text_vectors

# Blocks, millions of parameters of the tower with its projector, and columns of an embedding.
SIZES = {
    "qwen3-vl-8b": (27, 576.4, 4 * 4096),
    "qwen3.5-9b": (27, 456.0, 4096),
    "qwen3.5-27b": (27, 460.7, 5120),
    "qwen2.5-vl-3b": (32, 668.7, 2048),
    "qwen2.5-vl-7b": (32, 676.6, 3584),
    "qwen2-vl-2b": (32, 665.3, 1536),
    "qwen2-vl-7b": (32, 675.8, 3584),
    "glm-4.1v-9b": (24, 892.5, 4096),
    "glm-4.6v": (24, 858.7, 4096),
    "kimi-vl-a3b": (27, 447.5, 2048),
    "kimi-k2.5": (27, 416.9, 4608),
    "internvl3-8b": (24, 304.0 + 27.5, 3584),
    "internvl3-38b": (45, 5536.5 + 91.8, 5120),
    "llama4": (34, 851.0 + 21.0, 5120),
    "siglip-so400m-384": (27, 428.2, 1152),
    "clip-l-336": (24, 303.5, 1024),
    "dinov2-l-518": (24, 304.4, 1024),
    "deepseek-ocr": (24, 401.4, 1280),
    "step3-vl": (63, 4675.4, 7168),
    "step3p7": (47, 1955.8 + 25.2, 4096),
}


def test_every_architecture_is_tested() -> None:
    assert SIZES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("model", SIZES)
def test_towers_have_their_published_sizes(model: str) -> None:
    blocks, millions, hidden = SIZES[model]
    tower = demo_tower(device="meta", model=model)
    wrapped = architecture(model).family.wrap(tower)
    assert architecture(model).blocks == blocks
    assert sum(p.numel() for p in tower.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert wrapped.out_hidden_size == hidden


@pytest.mark.parametrize(
    ("model", "name", "by_blocks"),
    [
        ("qwen3-vl-8b", "deepstack_visual_indexes", {1: [0], 4: [1, 2, 3], 27: [8, 16, 24]}),
        ("qwen2.5-vl-7b", "fullatt_block_indexes", {1: [0], 10: [7, 9], 32: [7, 15, 23, 31]}),
        ("deepseek-ocr", "global_attn_indexes", {1: [0], 4: [1], 24: [2, 5, 8, 11]}),
    ],
)
def test_levels_fit_the_depth(model: str, name: str, by_blocks: dict[int, list[int]]) -> None:
    for blocks, expected in by_blocks.items():
        vision: Any = architecture(model).settings(blocks)["vision_config"]
        assert (vision["width"]["sam_vit_b"] if "width" in vision else vision)[name] == expected


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"--model gpt: expected one of qwen3-vl-8b, .*step3p7"):
        demo_tower(1, model="gpt")


@pytest.mark.parametrize("blocks", [0, 28])
def test_a_tower_has_1_to_all_blocks(blocks: int) -> None:
    with pytest.raises(InputError, match=f"blocks: expected 1 to 27; got {blocks}"):
        demo_tower(blocks)


@pytest.mark.parametrize("model", ["kimi-vl-a3b", "clip-l-336"])
@torch.no_grad()
def test_a_tower_with_random_weights_is_sane(model: str) -> None:
    tower = demo_tower(1, dtype=torch.bfloat16, model=model)
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in tower.buffers() if b.is_floating_point()} <= {torch.float32}
    assert all(parameter.std() > 0.01 for parameter in tower.parameters())
    wrapped = architecture(model).family.wrap(tower.float())
    output = wrapped.encoder_eager_forward(random_inputs(wrapped, [16 if model.startswith("kimi") else 1]))
    assert 0.2 < output.std() < 5


def test_random_inputs_have_the_sizes_asked_for() -> None:
    def sizes(model: str, wanted: list[int]) -> list[int]:
        wrapped = architecture(model).family.wrap(demo_tower(1, model=model))
        inputs = random_inputs(wrapped, wanted)
        assert len(wrapped.get_encoder_cudagraph_item_specs(inputs)) == len(wanted)
        return [spec.input_size for spec in wrapped.get_encoder_cudagraph_item_specs(inputs)]

    assert sizes("qwen2-vl-2b", [16, 96, 660]) == [16, 96, 660]
    assert sizes("kimi-vl-a3b", [64, 4]) == [64, 4]
    assert sizes("clip-l-336", [1, 3]) == [1, 3]
    assert sizes("deepseek-ocr", [0, 4, 9]) == [4096, 4096 + 4 * 1600, 4096 + 9 * 1600]


@pytest.mark.parametrize("package", ["PIL", "safetensors", "transformers"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"the extra 'hf'; run: pip install "):
        importlib.reload(fxsplit_encoder.models)


def test_another_missing_module_is_named_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("No module named 'regex'", name="regex")
    monkeypatch.setattr(importlib, "import_module", mock.Mock(side_effect=missing))
    with pytest.raises(ModuleNotFoundError, match="regex"):
        importlib.reload(fxsplit_encoder.models)


@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.no_grad()
def test_from_a_checkpoint_and_a_file_to_embeddings(name: str, photograph: Path, tmp_path: Path) -> None:
    saved, directory = save(tmp_path / "checkpoint", name)
    family, settings = read_family(Checkpoint.locate(directory))
    tower = load_tower(directory, torch.float32, CPU)
    expected = dict(saved.named_parameters())
    assert all(torch.equal(parameter, expected[key]) for key, parameter in tower.named_parameters())
    assert not tower.training and not any(p.requires_grad for p in tower.parameters())
    inputs = load_inputs([photograph, photograph], family.prepare(settings, ProcessorSettings()))
    wrapped = family.wrap(share_weights(tower))
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(enabled=False))
    ours = manager.execute(inputs.mm_kwargs)
    eager = family.eager_tower(saved)
    for item, own in zip(ours, eager(inputs.mm_kwargs), strict=True):
        assert item.shape == (CHECKPOINTS[name][2], wrapped.out_hidden_size)
        assert item.std() > 0
        torch.testing.assert_close(item, own, rtol=0, atol=1e-4 * float(own.abs().max()))
    alone = eager(as_tensors(eager.adapter.select_encoder_cudagraph_items(inputs.mm_kwargs, [1])))
    torch.testing.assert_close(alone[0], ours[1], rtol=0, atol=1e-4 * float(ours[1].abs().max()))


def test_every_family_has_a_checkpoint_here() -> None:
    tested = {id(FAMILIES[name]) for name in CHECKPOINTS}
    bare = {"llama4_vision_model", "step3p5_vision", "glm46v"}
    untested = {name for name, family in FAMILIES.items() if id(family) not in tested}
    audio = {"whisper"}  # in test_whisper.py
    dense = {"siglip_vision_model", "siglip2", "siglip2_vision_model", "clip", "dinov3_vit"}
    dense |= {"CLIPVisionModelWithProjection"}  # below, with their vectors
    assert not untested - bare - audio - dense


def test_models_of_images_refuse_clips(tmp_path: Path) -> None:
    path = clip(tmp_path / "clip.webp", 2)
    for name in ("llama4", "kimi_vl", "siglip"):
        preparation = FAMILIES[name].prepare({}, ProcessorSettings())
        with pytest.raises(InputError, match=r"clip\.webp: it is a clip, and this model takes images only"):
            load_inputs([path], preparation)


def test_a_processors_statistics_are_used() -> None:
    own = ProcessorSettings({"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]})
    white = Image.new("RGB", (336, 336), (255, 255, 255))
    for name in ("internvl", "llama4", "siglip", "clip", "dinov2", "DeepseekOCRForCausalLM", "step3_vl"):
        pixels = FAMILIES[name].prepare({}, own).image(white).tensors["pixel_values"]
        assert pixels.max().item() == pytest.approx(1.0)


# --- the models' own vectors of images and texts


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
