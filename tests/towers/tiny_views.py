"""Towers that see an image as a whole and as crops, with tiny sizes."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7Config, Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Model, Step3p7VisionModel

from fxsplit_encoder.models.encoders.deepseek_encoder import ClipConfig, DeepseekOcrConfig, SamConfig
from fxsplit_encoder.models.encoders.step3_vision import Step3VisionConfig

from .tiny_tiles import text_config


def deepseek_ocr_config(layers: int = 1, **sizes: int) -> DeepseekOcrConfig:
    """Whole images have the stored positions' grid (16 x 16 patches), crops another (12 x 12); neither is a
    multiple of the window. The second of SAM's layers attends over all of it.
    """
    return DeepseekOcrConfig(
        **{"base_size": 64, "image_size": 48, "out_hidden_size": 24, **sizes},
        sam=SamConfig(
            image_size=64,
            patch_size=4,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            window_size=5,
            global_layers=(1,),
            neck_channels=12,
            downsample_channels=(16, 20),
        ),
        clip=ClipConfig(
            image_size=28,
            patch_size=7,
            hidden_size=20,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=40,
        ),
    )


def step3_config(layers: int = 1) -> Step3VisionConfig:
    """Whole images have the stored positions' grid (8 x 8 patches), crops a smaller one (6 x 6)."""
    return Step3VisionConfig(
        image_size=32,
        crop_size=24,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=48,
        output_hidden_size=40,
        out_hidden_size=24,
    )


def step3p7_sizes(blocks: int = 1) -> dict[str, Any]:
    """Large patches, since the sizes of images are fixed: 13 x 13 of a whole one, 9 x 9 of a crop."""
    return {
        "hidden_size": 32,
        "num_hidden_layers": blocks,
        "num_attention_heads": 2,
        "image_size": 728,
        "patch_size": 56,
        "mlp_ratio": 1.5,
    }


def step3p7(blocks: int = 1) -> nn.Module:
    text = text_config(
        hidden_size=24,
        intermediate_size=8,
        moe_intermediate_size=8,
        share_expert_dim=8,
        moe_num_experts=2,
        moe_top_k=1,
        head_dim=12,
        num_attention_groups=1,
    )
    return Step3p7Model(Step3p7Config(vision_config=step3p7_sizes(blocks), text_config=text))


def step3p7_tower(blocks: int = 1) -> nn.Module:
    return Step3p7VisionModel(Step3p7VisionConfig(**step3p7_sizes(blocks)))
