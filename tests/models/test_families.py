"""Every family from a checkpoint and an image file to embeddings, at tiny sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.eager import as_tensors, share_weights
from fxsplit_encoder.models.load import load_tower, read_family
from fxsplit_encoder.models.prepare import ProcessorSettings, load_inputs
from fxsplit_encoder.models.registry import FAMILIES

from .checkpoints import CHECKPOINTS, CPU, clip, save


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
    assert untested - bare - audio == {name for name in FAMILIES if name.startswith("qwen3_vl")}


def test_what_is_beside_the_tower_is_not_read_and_what_is_missing_is_named(tmp_path: Path) -> None:
    tower, directory = save(tmp_path / "checkpoint", "DeepseekOCRForCausalLM")
    tensors = {f"model.{key}": value.clone() for key, value in tower.named_parameters()}
    del tensors["model.image_newline"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(InputError, match="1 tensors missing: image_newline"):
        load_tower(directory, torch.float32, CPU)


def test_models_of_images_refuse_clips(tmp_path: Path) -> None:
    path = clip(tmp_path / "clip.webp", 2)
    for name in ("llama4", "kimi_vl", "siglip"):
        preparation = FAMILIES[name].prepare({}, ProcessorSettings())
        with pytest.raises(InputError, match=r"clip\.webp: it is a clip, and this model takes images only"):
            load_inputs([path], preparation)


@pytest.mark.parametrize(
    ("name", "size", "layout", "short"),
    [
        ("internvl", (1344, 896), {"tiles": 7}, "7"),
        ("internvl", (300, 300), {"tiles": 1}, "1"),
        ("llama4", (900, 440), {"tiles": 7}, "7"),
        ("DeepseekOCRForCausalLM", (1280, 640), {"crops": (2, 1)}, "1+2"),
        ("DeepseekOCRForCausalLM", (640, 300), {"crops": (0, 0)}, "1"),
        ("step3p7", (1100, 520), {"crops": (2, 1)}, "1+2"),
        ("clip", (500, 300), {"tiles": 1}, "1"),
    ],
)
def test_how_an_image_is_cut_is_told(
    name: str, size: tuple[int, int], layout: dict[str, Any], short: str
) -> None:
    settings = {"vision_config": {"image_size": 336}} if name == "llama4" else {}
    prepared = FAMILIES[name].prepare(settings, ProcessorSettings()).image(Image.new("RGB", size))
    assert (prepared.layout, prepared.size) == (layout, short)


def test_a_processors_statistics_are_used() -> None:
    own = ProcessorSettings({"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]})
    white = Image.new("RGB", (336, 336), (255, 255, 255))
    for name in ("internvl", "llama4", "siglip", "clip", "dinov2", "DeepseekOCRForCausalLM", "step3_vl"):
        pixels = FAMILIES[name].prepare({}, own).image(white).tensors["pixel_values"]
        assert pixels.max().item() == pytest.approx(1.0)
