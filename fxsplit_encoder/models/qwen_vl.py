"""The Qwen line and GLM-4V: patches in blocks of those that merge, frames in pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxsplit_encoder.models.family import VISUAL, Architecture, Family, Prepare, hugging_face, stack
from fxsplit_encoder.models.patches import FRAME_FORMAT, BlockPatches, block_eager
from fxsplit_encoder.models.prepare import CLIP, HALF
from fxsplit_encoder.models.sampling import by_length, by_seconds, first_to_last, whole_steps_of_equal_parts


def _family(module: str, tower: str, config: str, prepare: Prepare) -> Family:
    return Family(hugging_face(module, tower, config), prepare, "patches", block_eager, VISUAL)


_QWEN3 = BlockPatches.reader(16, HALF, first_to_last)
_QWEN2 = BlockPatches.reader(14, CLIP, whole_steps_of_equal_parts, video=FRAME_FORMAT)
_QWEN3_VL = _family("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig", _QWEN3)
_QWEN3_5 = _family("qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig", _QWEN3)
_QWEN2_5_VL = _family(
    "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig", _QWEN2
)
_QWEN2_VL = _family("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig", _QWEN2)
_GLM4V, _GLM46V = (
    _family(
        "glm4v",
        "Glm4vVisionModel",
        "Glm4vVisionConfig",
        BlockPatches.reader(14, CLIP, rule, images_are_clips=True),
    )
    for rule in (by_seconds, by_length)
)

FAMILIES = {
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
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm4v_vision", "glm4v_moe_vision"), _GLM4V),
    "glm46v": _GLM46V,
}


def _qwen3_vl(blocks: int) -> dict[str, Any]:
    # With fewer blocks the levels of deepstack keep their relative depth.
    levels = sorted({level * blocks // 27 for level in (8, 16, 24)})
    return {"depth": blocks, "out_hidden_size": 4096, "deepstack_visual_indexes": levels}


def _qwen2_5_vl(out_hidden_size: int) -> Callable[[int], dict[str, Any]]:
    def vision(blocks: int) -> dict[str, Any]:
        # Every eighth block attends to whole frames, and the last one.
        full = [b for b in range(blocks) if b % 8 == 7 or b == blocks - 1]
        sizes = {"hidden_size": 1280, "out_hidden_size": out_hidden_size}
        return {"depth": blocks, "fullatt_block_indexes": full, **sizes}

    return vision


def _qwen3_5(out_hidden_size: int) -> Callable[[int], dict[str, Any]]:
    return stack("depth", out_hidden_size=out_hidden_size)


def _qwen2_vl(hidden_size: int) -> Callable[[int], dict[str, Any]]:
    return stack("depth", hidden_size=hidden_size)


ARCHITECTURES = {
    "qwen3-vl-8b": Architecture("Qwen3-VL-8B", "qwen3_vl", _QWEN3_VL, 27, _qwen3_vl),
    "qwen3.5-9b": Architecture("Qwen3.5-9B", "qwen3_5", _QWEN3_5, 27, _qwen3_5(4096)),
    "qwen3.5-27b": Architecture("Qwen3.5-27B", "qwen3_5", _QWEN3_5, 27, _qwen3_5(5120)),
    "qwen2.5-vl-3b": Architecture("Qwen2.5-VL-3B", "qwen2_5_vl", _QWEN2_5_VL, 32, _qwen2_5_vl(2048)),
    "qwen2.5-vl-7b": Architecture("Qwen2.5-VL-7B", "qwen2_5_vl", _QWEN2_5_VL, 32, _qwen2_5_vl(3584)),
    "qwen2-vl-2b": Architecture("Qwen2-VL-2B", "qwen2_vl", _QWEN2_VL, 32, _qwen2_vl(1536)),
    "qwen2-vl-7b": Architecture("Qwen2-VL-7B", "qwen2_vl", _QWEN2_VL, 32, _qwen2_vl(3584)),
    "glm-4.1v-9b": Architecture("GLM-4.1V-9B", "glm4v", _GLM4V, 24, stack("depth", intermediate_size=13696)),
    "glm-4.6v": Architecture("GLM-4.6V", "glm46v", _GLM46V, 24, stack("depth", intermediate_size=10944)),
}
