"""Which adapter wraps which Hugging Face class."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fxsplit_encoder.errors import MissingExtraError, UnsupportedTowerError

if TYPE_CHECKING:
    from torch import nn

    from fxsplit_encoder.towers.packed import PackedTower

# Class name of the tower -> module and class of its adapter. By name, so that no model family is imported
# before it is used.
_ADAPTERS = {
    "Glm4vMoeVisionModel": ("glm4v", "Glm4vTower"),
    "Glm4vVisionModel": ("glm4v", "Glm4vTower"),
    "Qwen2VisionTransformerPretrainedModel": ("qwen2_vl", "Qwen2VLTower"),
    "Qwen2_5_VisionTransformerPretrainedModel": ("qwen2_5_vl", "Qwen25VLTower"),
    "Qwen3_5MoeVisionModel": ("qwen3_5", "Qwen35Tower"),
    "Qwen3_5VisionModel": ("qwen3_5", "Qwen35Tower"),
    "KimiVLVisionModel": ("kimi_vl", "KimiVLTower"),
    "Kimi_K25VisionModel": ("kimi_k25", "KimiK25Tower"),
    "Qwen3VLMoeVisionModel": ("qwen3_vl", "Qwen3VLTower"),
    "Qwen3VLVisionModel": ("qwen3_vl", "Qwen3VLTower"),
}


def supported_towers() -> list[str]:
    """The class names of the towers that `wrap` takes."""
    return sorted(_ADAPTERS)


def wrap(tower: nn.Module) -> PackedTower:
    """Adapts a Hugging Face vision tower to the manager's protocol.

    The result is a module with the tower's own forward. The tower itself is used, not copied; its attention
    layers now call `fxsplit::varlen_attention`.

    Raises:
        UnsupportedTowerError: no adapter knows this class.
        MissingExtraError: transformers is not installed.
    """
    name = next((c.__name__ for c in type(tower).__mro__ if c.__name__ in _ADAPTERS), None)
    if name is None:
        raise UnsupportedTowerError(
            f"wrap: no adapter for {type(tower).__name__}; expected one of {', '.join(supported_towers())} "
            "(pass the vision tower itself, such as model.visual). torch.compile(module, "
            "backend='encoder_cg') works without an adapter"
        )
    module_name, class_name = _ADAPTERS[name]
    try:
        module = importlib.import_module(f"fxsplit_encoder.towers.{module_name}")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError("wrap", "hf") from error
    adapter: PackedTower = getattr(module, class_name)(tower)
    return adapter
