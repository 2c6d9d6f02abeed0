"""The vision towers of a model."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxsplit_encoder._torch.dynamo import original_module
from fxsplit_encoder.errors import InputError, UnsupportedTowerError
from fxsplit_encoder.messages import shown
from fxsplit_encoder.towers.base import WrappedTower

_LAYERS = ("vision_feature_layer", "vision_feature_layers")


@dataclass(frozen=True)
class FoundTower:
    """A tower in a model."""

    name: str
    """Where it is, with dots; empty if it is the model itself."""
    module: nn.Module
    layers: tuple[int, ...]
    """The layers whose hidden states the model around it reads, as its configuration says."""


def find_towers(model: Any) -> list[FoundTower]:
    """The towers of a model that can be served, each once; InputError for what is no module or is wrapped,
    UnsupportedTowerError if there is none.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"accelerate: expected a model of transformers; got {shown(model)}")
    model = original_module(model)
    for name, module in model.named_modules():
        if isinstance(module, WrappedTower):
            raise InputError(
                f"accelerate: expected a model as it was loaded; got one whose {name or 'tower'} is wrapped; "
                "put the tower itself back, which is its attribute `tower`"
            )
    found = list(_walk(model, "", model))
    if not found:
        raise UnsupportedTowerError(
            f"accelerate: {type(model).__name__} has no vision tower that is known; expected one of "
            f"{', '.join(served_towers())}. Wrap another by wrap(tower, DenseTowerSpec(...)), or by its own "
            "adapter, for EncoderCudaGraphManager or torch.compile(backend='encoder_cg')"
        )
    return found


def _walk(module: nn.Module, name: str, owner: nn.Module) -> Iterator[FoundTower]:
    """The towers below a module, nearest first; `owner` is the last module that names layers to read."""
    if is_served(module):
        yield FoundTower(name, module, () if owner is module else _layers_of(owner))
        return
    if _layers_of(module):
        owner = module
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key, owner)


def _layers_of(owner: nn.Module) -> tuple[int, ...]:
    config = getattr(owner, "config", None)
    for name in _LAYERS:
        layers = getattr(config, name, None)
        if layers is not None:
            return (layers,) if isinstance(layers, int) else tuple(layers)
    return ()


# --- classes of towers

# By name, so that neither a model family nor an adapter is imported before it is used.
_CALLS = {
    "CLIPVisionModel": ("dense_calls", "DenseCalls"),
    "CLIPVisionTransformer": ("dense_calls", "DenseCalls"),
    "DINOv3ViTModel": ("dense_calls", "DenseCalls"),
    "Dinov2Model": ("dense_calls", "DenseCalls"),
    "Dinov2WithRegistersModel": ("dense_calls", "DenseCalls"),
    "Glm4vMoeVisionModel": ("packed_calls", "GridCalls"),
    "Glm4vVisionModel": ("packed_calls", "GridCalls"),
    "Idefics3VisionTransformer": ("dense_calls", "Idefics3Calls"),
    "InternVLVisionModel": ("dense_calls", "DenseCalls"),
    "Kimi_K25VisionModel": ("packed_calls", "GridCalls"),
    "Llama4VisionModel": ("dense_calls", "Llama4Calls"),
    "PixtralVisionModel": ("packed_calls", "PixtralCalls"),
    "Qwen2VisionTransformerPretrainedModel": ("packed_calls", "GridCalls"),
    "Qwen2_5_VisionTransformerPretrainedModel": ("packed_calls", "GridCalls"),
    "Qwen3VLMoeVisionModel": ("packed_calls", "GridCalls"),
    "Qwen3VLVisionModel": ("packed_calls", "GridCalls"),
    "Qwen3_5MoeVisionModel": ("packed_calls", "GridCalls"),
    "Qwen3_5VisionModel": ("packed_calls", "GridCalls"),
    "Siglip2VisionModel": ("dense_calls", "Siglip2Calls"),
    "Siglip2VisionTransformer": ("dense_calls", "Siglip2Calls"),
    "SiglipVisionModel": ("dense_calls", "DenseCalls"),
    "SiglipVisionTransformer": ("dense_calls", "DenseCalls"),
    "SmolVLMVisionTransformer": ("dense_calls", "Idefics3Calls"),
    "Step3p7VisionModel": ("dense_calls", "Step3p7Calls"),
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
    return getattr(importlib.import_module(f"fxsplit_encoder.hugging_face.{file}"), kind)


def _name(module: nn.Module) -> str | None:
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _CALLS), None)
