"""GLM-4.1V and GLM-4.6V: patches in blocks as the Qwen line has them, by a processor of their own."""

from __future__ import annotations

from fxsplit_encoder.models.family import VISUAL, Architecture, Family, hugging_face, stack
from fxsplit_encoder.models.patches import GLM4V, BlockPatches, block_eager
from fxsplit_encoder.models.prepare import CLIP
from fxsplit_encoder.models.sampling import Rule, by_length, by_seconds


def _family(rule: Rule) -> Family:
    build = hugging_face("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig")
    return Family(build, BlockPatches.reader(14, CLIP, rule, GLM4V), "patches", block_eager, VISUAL)


_GLM4V = _family(by_seconds)
_GLM46V = _family(by_length)

FAMILIES = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm4v_vision", "glm4v_moe_vision"), _GLM4V),
    "glm46v": _GLM46V,
}

ARCHITECTURES = {
    "glm-4.1v-9b": Architecture("GLM-4.1V-9B", "glm4v", _GLM4V, 24, stack("depth", intermediate_size=13696)),
    "glm-4.6v": Architecture("GLM-4.6V", "glm46v", _GLM46V, 24, stack("depth", intermediate_size=10944)),
}
