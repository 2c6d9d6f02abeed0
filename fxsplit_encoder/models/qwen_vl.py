"""The Qwen line and GLM-4V: patches in blocks of those that merge, frames in pairs."""

from __future__ import annotations

from fxsplit_encoder.models.family import VISUAL, Family, Prepare, hugging_face
from fxsplit_encoder.models.patches import FRAME_FORMAT, BlockPatches, block_eager
from fxsplit_encoder.models.prepare import CLIP, HALF
from fxsplit_encoder.models.sampling import by_length, by_seconds, first_to_last, whole_steps_of_equal_parts


def _family(module: str, tower: str, prepare: Prepare) -> Family:
    return Family(hugging_face(module, tower), prepare, "patches", block_eager, VISUAL)


_QWEN3 = BlockPatches.reader(16, HALF, first_to_last)
_QWEN2 = BlockPatches.reader(14, CLIP, whole_steps_of_equal_parts, video=FRAME_FORMAT)
_QWEN3_VL = _family("qwen3_vl", "Qwen3VLVisionModel", _QWEN3)
_QWEN3_5 = _family("qwen3_5", "Qwen3_5VisionModel", _QWEN3)
_QWEN2_5_VL = _family("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", _QWEN2)
_QWEN2_VL = _family("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", _QWEN2)
_GLM4V, _GLM46V = (
    _family(
        "glm4v",
        "Glm4vVisionModel",
        BlockPatches.reader(14, CLIP, rule, images_are_clips=True),
    )
    for rule in (by_seconds, by_length)
)

FAMILIES = {
    # Mixture-of-experts models share the dense ones' tower.
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_vl_vision", "qwen3_vl_moe_vision"), _QWEN3_VL),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_vision", "qwen3_5_moe_vision"), _QWEN3_5),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), _QWEN2_5_VL),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_vision"), _QWEN2_VL),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm4v_vision", "glm4v_moe_vision"), _GLM4V),
    "glm46v": _GLM46V,
}
