"""The checkpoint's own image processor is preferred, where transformers can make it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.registry import FAMILIES

from .processors import noise

MEAN = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.5, 0.5, 0.5]}
QWEN = {"size": {"shortest_edge": 3136, "longest_edge": 16_777_216}, "patch_size": 16, "merge_size": 2}
INTERNVL = {"size": {"height": 28, "width": 28}, "min_patches": 1, "max_patches": 4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ("Qwen2VLImageProcessor", {**QWEN, "temporal_patch_size": 2}, {"patch_size": 16}),
    "internvl": ("GotOcr2ImageProcessor", INTERNVL, {"image_size": [28, 28]}),
    "siglip": ("SiglipImageProcessor", {"size": {"height": 28, "width": 28}}, {"image_size": 28}),
    "clip": (
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        {"image_size": 28},
    ),
}
"""The processor's class and settings, and the vision tower's, by model type."""


# Resizing by torchvision rounds some values to the next of 256 levels, of which 2 are normalized here.
MOST_DIFFERENCE = 1.01 * 2 / 255 if importlib.util.find_spec("torchvision") else 0


def checkpoint(directory: Path, name: str) -> tuple[Checkpoint, dict[str, Any]]:
    processor, given, vision = CASES[name]
    settings = {"model_type": name, "vision_config": vision}
    own = {"image_processor_type": processor, **given, **MEAN}
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "preprocessor_config.json").write_text(json.dumps(own), encoding="utf-8")
    return Checkpoint.locate(directory), settings


def has_auto_processor() -> bool:
    """Older versions of transformers import it with torchvision alone."""
    from transformers import AutoImageProcessor

    try:
        return bool(AutoImageProcessor.from_pretrained)
    except ImportError:
        return False


@pytest.mark.skipif(not has_auto_processor(), reason="this transformers imports it with torchvision alone")
@pytest.mark.parametrize("name", CASES)
def test_it_makes_the_pixels_that_ours_makes(name: str, tmp_path: Path) -> None:
    found, settings = checkpoint(tmp_path, name)
    processors = found.processors()
    assert type(processors.own).__name__.startswith(CASES[name][0])
    family = FAMILIES[name]
    own, ours = (
        family.prepare(settings, each).image(noise(96, 64))
        for each in (processors, type(processors)(processors.image, processors.video))
    )
    assert own.layout == ours.layout
    for key, tensor in own.tensors.items():
        torch.testing.assert_close(tensor, ours.tensors[key], rtol=0, atol=MOST_DIFFERENCE)


def stand_in(monkeypatch: pytest.MonkeyPatch, from_pretrained: Any) -> None:
    monkeypatch.setattr(transformers, "AutoImageProcessor", SimpleNamespace(from_pretrained=from_pretrained))


@pytest.mark.parametrize("name", CASES)
def test_it_goes_before_ours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, settings = checkpoint(tmp_path, name)
    ours = FAMILIES[name].prepare(settings, found.processors())
    made = {"pixel_values": torch.ones(4, 3, 28, 28), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    processor = mock.Mock(spec=[], return_value=made)
    stand_in(monkeypatch, lambda *_, **__: processor)
    own = FAMILIES[name].prepare(settings, found.processors())
    assert type(own) is type(ours)
    own.image(noise(96, 64))
    processor.assert_called_once()
    assert processor.call_args.kwargs.get("crop_to_patches", True), "an InternVL's own settings may say no"


@pytest.mark.parametrize("error", [ImportError("torchvision"), OSError("hub"), ValueError("remote code")])
def test_one_that_cannot_be_made_is_done_without(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **options: Any) -> None:
        assert options == {"trust_remote_code": False}, "nobody is asked whether to run a checkpoint's code"
        raise error

    stand_in(monkeypatch, fail)
    found, settings = checkpoint(tmp_path, "qwen3_vl")
    assert found.processors().own is None
    prepared = FAMILIES["qwen3_vl"].prepare(settings, found.processors()).image(noise(96, 64))
    assert prepared.tensors["pixel_values"].shape == (24, 1536)
