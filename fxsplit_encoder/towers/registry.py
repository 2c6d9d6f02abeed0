"""Which adapter wraps which Hugging Face class."""

from __future__ import annotations

import importlib

from torch import nn

from fxsplit_encoder.errors import MissingExtraError, UnsupportedTowerError
from fxsplit_encoder.towers.dense import DenseTower
from fxsplit_encoder.towers.generic import DenseTowerSpec
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.tiled import TiledTower

# Class name of the tower -> module and class of its adapter. By name, so that no model family is imported
# before it is used.
_ADAPTERS = {
    "DeepseekOcrVisionModel": ("deepseek_ocr", "DeepseekOcrTower"),
    "Glm4vMoeVisionModel": ("glm4v", "Glm4vTower"),
    "Glm4vVisionModel": ("glm4v", "Glm4vTower"),
    "InternVLForConditionalGeneration": ("internvl", "InternVLTower"),
    "InternVLModel": ("internvl", "InternVLTower"),
    "KimiVLVisionModel": ("kimi", "KimiVLTower"),
    "Kimi_K25VisionModel": ("kimi", "KimiK25Tower"),
    "Llama4ForConditionalGeneration": ("llama4", "Llama4Tower"),
    "Llama4VisionModel": ("llama4", "Llama4Tower"),
    "Qwen2VisionTransformerPretrainedModel": ("qwen_vl", "Qwen2VLTower"),
    "Qwen2_5_VisionTransformerPretrainedModel": ("qwen_vl", "Qwen25VLTower"),
    "Qwen3_5MoeVisionModel": ("qwen_vl", "Qwen35Tower"),
    "Qwen3_5VisionModel": ("qwen_vl", "Qwen35Tower"),
    "Qwen3VLMoeVisionModel": ("qwen_vl", "Qwen3VLTower"),
    "Qwen3VLVisionModel": ("qwen_vl", "Qwen3VLTower"),
    "Step3VisionModel": ("step3_vl", "Step3VLTower"),
    "Step3p7Model": ("step3p7", "Step3p7Tower"),
    "Step3p7VisionModel": ("step3p7", "Step3p7Tower"),
}


def supported_towers() -> list[str]:
    """The class names of the towers that `wrap` takes."""
    return sorted(_ADAPTERS)


def wrap(tower: nn.Module, spec: DenseTowerSpec | None = None) -> PackedTower | DenseTower | TiledTower:
    """Adapts a vision tower to the manager's protocol, as a module with the tower's own forward.

    The tower is used, not copied: attention of a packed tower now calls `fxsplit::varlen_attention`, that of
    a dense one torch's `scaled_dot_product_attention`.

    Args:
        tower: a tower that `supported_towers` names; where the connector belongs to the model, the model.
        spec: declares any other module that encodes a batch of images of one size.

    Raises:
        UnsupportedTowerError: no adapter knows this class.
        MissingExtraError: transformers is not installed.
    """
    if spec is not None:
        from fxsplit_encoder.towers.generic import GenericTower

        return GenericTower(tower, spec)
    name = next((c.__name__ for c in type(tower).__mro__ if c.__name__ in _ADAPTERS), None)
    if name is None:
        raise UnsupportedTowerError(
            f"wrap: no adapter for {type(tower).__name__}; expected one of {', '.join(supported_towers())} "
            "(pass the vision tower itself, such as model.visual). Declare a module that encodes a batch of "
            "images of one size by wrap(module, DenseTowerSpec(...)), and derive the adapter of one that "
            "packs patches from PackedTower; torch.compile(module, backend='encoder_cg') needs no adapter"
        )
    module_name, class_name = _ADAPTERS[name]
    try:
        module = importlib.import_module(f"fxsplit_encoder.towers.{module_name}")
        adapter: PackedTower | DenseTower | TiledTower = getattr(module, class_name)(tower)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError("wrap", "hf") from error
    return adapter
