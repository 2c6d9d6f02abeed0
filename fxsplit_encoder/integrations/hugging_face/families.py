"""Which classes of towers are served in their models, and how each is called."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

# By name, so that neither a model family nor an adapter is imported before it is used.
_CALLS = {
    "CLIPVisionModel": ("dense_calls", "DenseCalls"),
    "CLIPVisionTransformer": ("dense_calls", "DenseCalls"),
    "DINOv3ViTModel": ("dense_calls", "DenseCalls"),
    "Dinov2Model": ("dense_calls", "DenseCalls"),
    "Dinov2WithRegistersModel": ("dense_calls", "DenseCalls"),
    "Glm4vMoeVisionModel": ("grid_calls", "GridCalls"),
    "Glm4vVisionModel": ("grid_calls", "GridCalls"),
    "Idefics3VisionTransformer": ("tile_calls", "Idefics3Calls"),
    "InternVLVisionModel": ("dense_calls", "DenseCalls"),
    "Kimi_K25VisionModel": ("grid_calls", "GridCalls"),
    "Llama4VisionModel": ("tile_calls", "Llama4Calls"),
    "PixtralVisionModel": ("pixtral_calls", "PixtralCalls"),
    "Qwen2VisionTransformerPretrainedModel": ("grid_calls", "GridCalls"),
    "Qwen2_5_VisionTransformerPretrainedModel": ("grid_calls", "GridCalls"),
    "Qwen3VLMoeVisionModel": ("grid_calls", "GridCalls"),
    "Qwen3VLVisionModel": ("grid_calls", "GridCalls"),
    "Qwen3_5MoeVisionModel": ("grid_calls", "GridCalls"),
    "Qwen3_5VisionModel": ("grid_calls", "GridCalls"),
    "Siglip2VisionModel": ("siglip2_calls", "Siglip2Calls"),
    "Siglip2VisionTransformer": ("siglip2_calls", "Siglip2Calls"),
    "SiglipVisionModel": ("dense_calls", "DenseCalls"),
    "SiglipVisionTransformer": ("dense_calls", "DenseCalls"),
    "SmolVLMVisionTransformer": ("tile_calls", "Idefics3Calls"),
    "Step3p7VisionModel": ("tile_calls", "Step3p7Calls"),
}


def served_towers() -> list[str]:
    """The class names of the towers that `accelerate` serves."""
    return sorted(_CALLS)


def is_served(module: nn.Module) -> bool:
    """Whether a module is such a tower."""
    return _name(module) is not None


def calls_of(module: nn.Module) -> Any:
    """The class of `Calls` for a tower."""
    name = _name(module)
    assert name is not None
    file, kind = _CALLS[name]
    return getattr(importlib.import_module(f"fxsplit_encoder.integrations.hugging_face.{file}"), kind)


def _name(module: nn.Module) -> str | None:
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _CALLS), None)
