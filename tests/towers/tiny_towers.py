"""Every registered tower class with tiny sizes and random weights.

A class that is registered needs an entry of its own in `TINY`; `test_conformance.py` then tests it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxsplit_encoder.models.encoders.deepseek_encoder import DeepseekOcrVisionModel
from fxsplit_encoder.models.encoders.step3_vision import Step3VisionModel

from .random_weights import randomize
from .tiny_inputs import Inputs, PackedInputs, TileInputs, ViewInputs
from .tiny_packed import (
    PATCH,
    exaone,
    glm4v,
    kimi_k25,
    kimi_vl,
    qwen2_5_omni,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
)
from .tiny_tiles import internvl, internvl_with_head, llama4, llama4_tower
from .tiny_views import deepseek_ocr_config, step3_config, step3p7, step3p7_tower


@dataclass(frozen=True)
class Tiny:
    """One registered class."""

    make: Callable[[], nn.Module]
    inputs: Inputs


QWEN = PackedInputs(patch_shape=(3 * 2 * PATCH**2,))
RASTER = (3, PATCH, PATCH)
STEP3P7 = ViewInputs(
    *("pixel_values", "pixel_values_local", "num_local_patches"),
    whole_size=728,
    crop_size=504,
    whole_tokens=16,  # 13, 7, 4 a side
    crop_tokens=9,  # 9, 5, 3 a side
)

TINY: dict[str, Tiny] = {
    "DeepseekOcrVisionModel": Tiny(
        lambda: DeepseekOcrVisionModel(deepseek_ocr_config()),
        ViewInputs(
            *("pixel_values", "images_crop", "images_spatial_crop"),
            whole_size=64,
            crop_size=48,
            whole_tokens=20,  # 4 x 4 and a newline after each line
            crop_tokens=9,
            grid_counts=True,
            separators=True,
        ),
    ),
    "Exaone4_5_VisionModel": Tiny(exaone, QWEN),
    "Glm4vMoeVisionModel": Tiny(lambda: glm4v(moe=True), QWEN),
    "Glm4vVisionModel": Tiny(glm4v, QWEN),
    "InternVLForConditionalGeneration": Tiny(internvl_with_head, TileInputs(videos=((2,), (3,)))),
    "InternVLModel": Tiny(internvl, TileInputs(videos=((2,), (3,)))),
    "KimiVLVisionModel": Tiny(
        kimi_vl, PackedInputs(RASTER, ("pixel_values", "image_grid_hws"), sizes_with_frames=False, videos=())
    ),
    "Kimi_K25VisionModel": Tiny(kimi_k25, PackedInputs(RASTER, pooled=True)),
    "Llama4ForConditionalGeneration": Tiny(llama4, TileInputs()),
    "Llama4VisionModel": Tiny(llama4_tower, TileInputs()),
    "Qwen2VisionTransformerPretrainedModel": Tiny(qwen2_vl, QWEN),
    "Qwen2_5OmniVisionEncoder": Tiny(qwen2_5_omni, QWEN),
    "Qwen2_5_VisionTransformerPretrainedModel": Tiny(qwen2_5_vl, QWEN),
    "Qwen3VLMoeVisionModel": Tiny(lambda: qwen3_vl(moe=True), QWEN),
    "Qwen3VLVisionModel": Tiny(qwen3_vl, QWEN),
    "Qwen3_5MoeVisionModel": Tiny(lambda: qwen3_5(moe=True), QWEN),
    "Qwen3_5VisionModel": Tiny(qwen3_5, QWEN),
    "Step3VisionModel": Tiny(
        lambda: Step3VisionModel(step3_config()),
        ViewInputs(
            *("pixel_values", "patch_pixel_values", "num_patches"),
            whole_size=32,
            crop_size=24,
            whole_tokens=4,  # 8, 4, 2 a side
            crop_tokens=4,  # 6, 3, 2 a side
        ),
    ),
    "Step3p7Model": Tiny(step3p7, STEP3P7),
    "Step3p7VisionModel": Tiny(step3p7_tower, STEP3P7),
}


def tiny(name: str) -> Tiny:
    """The entry of a registered class."""
    return TINY[name]


def make(name: str) -> Any:
    """A tower of a registered class, with random weights."""
    return randomize(tiny(name).make())
