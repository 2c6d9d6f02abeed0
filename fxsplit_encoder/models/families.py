"""The vision towers that are known: how each is built, loaded, fed, and run eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.models import builders, eager
from fxsplit_encoder.models.builders import Build, Settings, hugging_face
from fxsplit_encoder.models.checkpoint_names import KIMI_K25, STEP3P7, Renames
from fxsplit_encoder.models.eager import EagerForward
from fxsplit_encoder.models.packed_inputs import BlockPatches, RasterPatches
from fxsplit_encoder.models.preparation import CLIP, HALF, IMAGENET, Preparation, ProcessorSettings
from fxsplit_encoder.models.tile_inputs import (
    DeepseekOcrViews,
    InternVLTiles,
    Llama4Tiles,
    OneTile,
    Step3Views,
)
from fxsplit_encoder.towers import DenseTowerSpec

Prepare = Callable[[Settings, ProcessorSettings], Preparation]


@dataclass(frozen=True)
class Family:
    """One kind of tower."""

    build: Build
    """What `wrap` takes."""
    prepare: Prepare
    """Images to inputs, by the model's and its processors' settings."""
    unit: str
    """What an item's size counts: patches or tiles."""
    eager: EagerForward | None = None
    """How it runs without this library; None: the model is ours, and it runs by its adapter."""
    prefixes: tuple[str, ...] = ("",)
    """What may come before the names of the tower's tensors in a checkpoint; the first that any name fits."""
    is_apart: bool = True
    """Whether only the tower's tensors begin with the prefix; else those of other modules are left out."""
    renames: Renames = ()
    """From a published checkpoint's names; see `checkpoint_names`."""
    class_rows: slice | None = None
    """For a tower without an adapter: the rows of a tile's output that are kept."""

    def wrap(self, module: nn.Module) -> Any:
        """The tower behind the manager's protocol."""
        return fx.wrap(module, None if self.class_rows is None else _dense_spec(module, self.class_rows))


def _dense_spec(module: Any, rows: slice) -> DenseTowerSpec:
    config = module.config
    tokens = (config.image_size // config.patch_size) ** 2
    shape = (config.num_channels, config.image_size, config.image_size)
    return DenseTowerSpec(shape, tokens, config.hidden_size, rows=rows)


_VISUAL = ("model.visual.", "visual.", "")
_WHOLE_MODEL = ("model.", "")


def _qwen(module: str, tower: str, config: str, prepare: Prepare) -> Family:
    return Family(hugging_face(module, tower, config), prepare, "patches", eager.packed, _VISUAL)


def _dense(build: Build, prepare: Prepare, rows: slice, *prefixes: str) -> Family:
    forward = functools.partial(eager.dense, rows=rows)
    return Family(build, prepare, "tiles", forward, (*prefixes, ""), class_rows=rows)


_QWEN3_VL = _qwen("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig", BlockPatches.reader(16, HALF))
_QWEN3_5 = _qwen("qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig", BlockPatches.reader(16, HALF))
_QWEN2_5_VL = _qwen(
    "qwen2_5_vl",
    "Qwen2_5_VisionTransformerPretrainedModel",
    "Qwen2_5_VLVisionConfig",
    BlockPatches.reader(14, CLIP),
)
_QWEN2_VL = _qwen(
    "qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", BlockPatches.reader(14, CLIP)
)
_GLM4V = _qwen("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig", BlockPatches.reader(14, CLIP, is_glm=True))
_KIMI_K25 = Family(
    hugging_face("kimi_k25", "Kimi_K25VisionModel", "Kimi_K25VisionConfig"),
    RasterPatches.of_kimi_k25,
    "patches",
    eager.kimi_k25,
    ("model.vision_tower.", "vision_tower.", ""),
    renames=KIMI_K25,
)
_KIMI_VL = Family(
    builders.build_kimi_vl, RasterPatches.of_kimi_vl, "patches", prefixes=_WHOLE_MODEL, is_apart=False
)
_INTERNVL = Family(
    builders.build_internvl,
    InternVLTiles.read,
    "tiles",
    eager.internvl,
    _WHOLE_MODEL,
    is_apart=False,
)
_LLAMA4 = Family(builders.build_llama4, Llama4Tiles.read, "tiles", eager.llama4, _WHOLE_MODEL, is_apart=False)
_LLAMA4_BARE = Family(
    hugging_face("llama4", "Llama4VisionModel", "Llama4VisionConfig"),
    Llama4Tiles.read,
    "tiles",
    eager.llama4,
)
_STEP3P7 = Family(
    builders.build_step3p7,
    Step3Views.reader("pixel_values_local", "num_local_patches"),
    "tiles",
    eager.step3p7,
    _WHOLE_MODEL,
    is_apart=False,
    renames=STEP3P7,
)
_STEP3P7_BARE = Family(
    hugging_face("step3p7", "Step3p7VisionModel", "Step3p7VisionConfig"),
    Step3Views.reader("pixel_values_local", "num_local_patches"),
    "tiles",
    eager.step3p7,
    renames=STEP3P7,
)
_STEP3 = Family(
    builders.build_step3,
    Step3Views.reader("patch_pixel_values", "num_patches"),
    "tiles",
    prefixes=_WHOLE_MODEL,
    is_apart=False,
)
_DEEPSEEK_OCR = Family(
    builders.build_deepseek_ocr, DeepseekOcrViews.read, "tiles", prefixes=_WHOLE_MODEL, is_apart=False
)
_CLASS_TOKEN = slice(1, None)
_SIGLIP = _dense(
    hugging_face("siglip", "SiglipVisionModel", "SiglipVisionConfig"),
    OneTile.of_siglip,
    slice(None),
    "vision_model.",
)
_CLIP = _dense(
    hugging_face("clip", "CLIPVisionModel", "CLIPVisionConfig"),
    OneTile.cropping(CLIP),
    _CLASS_TOKEN,
    "vision_model.",
)
_DINOV2 = _dense(
    hugging_face("dinov2", "Dinov2Model", "Dinov2Config"),
    OneTile.cropping(IMAGENET),
    _CLASS_TOKEN,
    "dinov2.",
)

FAMILIES: Mapping[str, Family] = {
    # Mixture-of-experts models share the dense ones' tower.
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_vl_vision": _QWEN3_VL,
    "qwen3_vl_moe_vision": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_vision": _QWEN3_5,
    "qwen3_5_moe_vision": _QWEN3_5,
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen2_5_vl_vision": _QWEN2_5_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_vision": _QWEN2_VL,
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "glm46v": _GLM4V,
    "glm4v_vision": _GLM4V,
    "glm4v_moe_vision": _GLM4V,
    "kimi_vl": _KIMI_VL,
    "kimi_k25": _KIMI_K25,
    "kimi_k25_vision": _KIMI_K25,
    "internvl": _INTERNVL,
    "llama4": _LLAMA4,
    "llama4_vision_model": _LLAMA4_BARE,
    "step3_vl": _STEP3,
    "step3p7": _STEP3P7,
    "step3p5_vision": _STEP3P7_BARE,
    # Its model type, deepseek_vl_v2, is also that of another model.
    "DeepseekOCRForCausalLM": _DEEPSEEK_OCR,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "dinov2": _DINOV2,
}
"""By a checkpoint's model type, of a whole model or of its vision tower; else by its architecture."""
