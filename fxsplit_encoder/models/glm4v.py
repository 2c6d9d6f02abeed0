"""GLM-4.1V and GLM-4.6V: patches in blocks as the Qwen line has them, by a processor of their own."""

from __future__ import annotations

from fxsplit_encoder.models.family import VISUAL, Architecture, Family, hugging_face, stack
from fxsplit_encoder.models.patches import BlockPatches, block_eager
from fxsplit_encoder.models.prepare import CLIP

_GLM4V = Family(
    hugging_face("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig"),
    BlockPatches.reader(14, CLIP, ("glm4v", "Glm4vImageProcessorPil")),
    "patches",
    block_eager,
    VISUAL,
)

FAMILIES = dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm4v_vision", "glm4v_moe_vision"), _GLM4V)

ARCHITECTURES = {
    "glm-4.1v-9b": Architecture("GLM-4.1V-9B", "glm4v", _GLM4V, 24, stack("depth", intermediate_size=13696)),
    "glm-4.6v": Architecture("GLM-4.6V", "glm46v", _GLM4V, 24, stack("depth", intermediate_size=10944)),
}
