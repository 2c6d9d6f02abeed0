"""Towers of published models beside `cli.architectures`, with random weights: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.internvl.configuration_internvl import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLModel
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel
from transformers.models.llama4.configuration_llama4 import Llama4Config
from transformers.models.llama4.modeling_llama4 import Llama4ForConditionalGeneration
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

from fxsplit_encoder.cli.models import distribution
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers import DenseTowerSpec
from fxsplit_encoder.towers.models.deepseek_encoder import DeepseekOcrVisionModel
from fxsplit_encoder.towers.models.moonvit import KimiVLVisionConfig, KimiVLVisionModel
from fxsplit_encoder.towers.models.step3_vision import Step3VisionConfig, Step3VisionModel

_INITIALIZER_RANGE = 0.02


@dataclass(frozen=True)
class RealTower:
    """A tower of published size."""

    blocks: int | None
    """Its depth; None where it is fixed."""

    make: Callable[[Any], nn.Module]
    """What `wrap` takes, with so many blocks."""

    spec: DenseTowerSpec | None = None
    """For `wrap`, where the family has no adapter."""


# The language model is nobody's concern here: one block, as narrow as its configuration allows.
_TEXT = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _internvl(blocks: int, text_width: int, vision: dict[str, Any]) -> nn.Module:
    text = {**_TEXT, **_NO_TOKENS, "model_type": "qwen2", "hidden_size": text_width, "intermediate_size": 8}
    return InternVLModel(
        InternVLConfig(vision_config={**vision, "num_hidden_layers": blocks}, text_config=text)
    )


def _llama4(blocks: int) -> nn.Module:
    vision = {
        "hidden_size": 1408,
        "num_hidden_layers": blocks,
        "vision_output_dim": 4096,
        "image_size": 336,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    moe = {"intermediate_size": 8, "intermediate_size_mlp": 8, "num_local_experts": 1, "head_dim": 8}
    text = {**_TEXT, **moe, "hidden_size": 5120, "pad_token_id": 0}
    return Llama4ForConditionalGeneration(Llama4Config(vision_config=vision, text_config=text))


def _siglip(blocks: int) -> nn.Module:
    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=blocks,
            num_attention_heads=16,
            image_size=384,
            patch_size=14,
        )
    )


def _clip(blocks: int) -> nn.Module:
    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=blocks,
            num_attention_heads=16,
            image_size=336,
            patch_size=14,
        )
    )


def _dinov2(blocks: int) -> nn.Module:
    return Dinov2Model(
        Dinov2Config(
            hidden_size=1024, num_hidden_layers=blocks, num_attention_heads=16, image_size=518, patch_size=14
        )
    )


_INTERNVIT_300M = {"attention_bias": True}
_INTERNVIT_6B = {
    "hidden_size": 3200,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "norm_type": "rms_norm",
    "use_qk_norm": True,
}
_CLASS_TOKEN = slice(1, None)

REAL_TOWERS: Mapping[str, RealTower] = {
    "kimi-k2.5": RealTower(27, lambda n: Kimi_K25VisionModel(Kimi_K25VisionConfig(num_hidden_layers=n))),
    "kimi-vl-a3b": RealTower(27, lambda n: KimiVLVisionModel(KimiVLVisionConfig(num_hidden_layers=n))),
    "deepseek-ocr": RealTower(None, lambda _: DeepseekOcrVisionModel()),
    "step3-vl": RealTower(63, lambda n: Step3VisionModel(Step3VisionConfig(num_layers=n))),
    "step3p7": RealTower(47, lambda n: Step3p7VisionModel(Step3p7VisionConfig(num_hidden_layers=n))),
    "internvl3-8b": RealTower(24, lambda n: _internvl(n, 3584, _INTERNVIT_300M)),
    "internvl3-38b": RealTower(45, lambda n: _internvl(n, 5120, _INTERNVIT_6B)),
    "llama4": RealTower(34, _llama4),
    "siglip-so400m-384": RealTower(27, _siglip, DenseTowerSpec((3, 384, 384), 729, 1152)),
    "clip-l-336": RealTower(24, _clip, DenseTowerSpec((3, 336, 336), 576, 1024, rows=_CLASS_TOKEN)),
    "dinov2-l-518": RealTower(24, _dinov2, DenseTowerSpec((3, 518, 518), 1369, 1024, rows=_CLASS_TOKEN)),
}
"""By the name that `real_tower` takes."""


@torch.no_grad()
def real_tower(
    name: str,
    blocks: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Build a tower of `REAL_TOWERS` with random weights, at its true width.

    Args:
        name: of the model.
        blocks: its depth, at most the model's own; None: the model's own, which cannot be changed everywhere.
        device: where its weights are drawn; on "meta" it has none.
        dtype: of the parameters. Buffers keep theirs: positions and frequencies are computed in float32.
        seed: the same weights for the same seed, on one kind of device.

    Raises:
        InputError: no such name, or more blocks than the model has, or none.
    """
    if name not in REAL_TOWERS:
        raise InputError(f"tower: expected one of {', '.join(REAL_TOWERS)}; got {name!r}")
    known = REAL_TOWERS[name]
    if blocks is not None and (known.blocks is None or not 1 <= blocks <= known.blocks):
        allowed = "None" if known.blocks is None else f"1 to {known.blocks}"
        raise InputError(f"blocks: expected {allowed} for {name}; got {blocks}")
    device = torch.device(device)
    # Not on "meta" first, as the command does: what no checkpoint holds, some of these towers compute when
    # they are made.
    with device:
        tower = known.make(known.blocks if blocks is None else blocks)
    generator = torch.Generator(device).manual_seed(seed) if device.type != "meta" else None
    for parameter_name, parameter in tower.named_parameters():
        if generator is not None:
            mean, deviation = distribution(parameter_name, parameter.dim(), _INITIALIZER_RANGE)
            parameter.normal_(mean, deviation, generator=generator)
        parameter.data = parameter.data.to(dtype)
    return tower.requires_grad_(False).train(False)
