"""A checkpoint of every family at tiny sizes, and files to encode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import FAMILIES

CPU = torch.device("cpu")
STACK = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
GRID = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48}
TILE = {**STACK, "image_size": 28, "patch_size": 14}
TEXT = {"text_config": {"hidden_size": 12}}
SAM = {"layers": 1, "heads": 1, "width": 16, "global_attn_indexes": [0], "downsample_channels": [16, 32]}
CLIP = {"layers": 1, "heads": 2, "width": 32}

# What config.json holds, the prefix of the tower's tensors, and the tokens of the photograph.
CHECKPOINTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "qwen2_vl": (
        {"vision_config": {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 20}},
        "visual.",
        15,
    ),
    "qwen2_5_vl": ({"vision_config": {**GRID, "out_hidden_size": 20}}, "model.visual.", 15),
    "qwen3_vl": (
        {"vision_config": {**GRID, "out_hidden_size": 20, "deepstack_visual_indexes": [0]}},
        "model.visual.",
        12,
    ),
    "qwen3_5": ({"vision_config": {**GRID, "out_hidden_size": 20}}, "model.visual.", 12),
    "glm4v": ({"vision_config": {**GRID, "out_hidden_size": 20, "image_size": 56}}, "model.visual.", 15),
    "kimi_vl": ({"vision_config": STACK, **TEXT}, "", 15),
    "kimi_k25": ({"vision_config": STACK}, "model.vision_tower.", 15),
    "internvl": ({"vision_config": {**TILE, "image_size": [28, 28], "patch_size": [14, 14]}, **TEXT}, "", 7),
    "llama4": (
        {
            "vision_config": {
                **TILE,
                "intermediate_size": 64,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            **TEXT,
        },
        "",
        16,
    ),
    "step3_vl": ({"vision_config": {**STACK, "output_hidden_size": 8}, **TEXT}, "model.", 331),
    "step3p7": ({"vision_config": {**STACK, "mlp_ratio": 1.5}, **TEXT}, "model.", 331),
    "DeepseekOCRForCausalLM": (
        {
            "model_type": "deepseek_vl_v2",
            "architectures": ["DeepseekOCRForCausalLM"],
            "vision_config": {"width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM}},
            "projector_config": {"n_embed": 12},
        },
        "model.",
        273,
    ),
    "siglip": ({"vision_config": TILE}, "vision_model.", 4),
    "clip_vision_model": ({"vision_config": TILE}, "vision_model.", 4),
    "dinov2": ({**STACK, "image_size": 28, "patch_size": 14}, "", 4),
}


def save(directory: Path, name: str, tensors: dict[str, torch.Tensor] | None = None) -> tuple[Any, Path]:
    """A tower with random weights, and a checkpoint of it beside tensors of another module."""
    settings, prefix, _ = CHECKPOINTS[name]
    settings = {"model_type": name, **settings}
    tower = FAMILIES[name].build(settings).requires_grad_(False).eval()
    draw_weights(tower, 0)
    own = {f"{prefix}{key}": value.clone() for key, value in tower.named_parameters()}
    language = {} if name == "dinov2" else {"model.layers.0.mlp.weight": torch.zeros(2)}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file({**own, **language} if tensors is None else tensors, directory / "model.safetensors")
    return tower, directory


def clip(path: Path, frames: int) -> Path:
    images = [Image.effect_noise((56, 84), 60).convert("RGB") for _ in range(frames)]
    images[0].save(path, save_all=True, append_images=images[1:], lossless=True)
    return path
