"""The families and the published models that are known, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models import dense, kimi, patches, tiles, views, whisper
from fxsplit_encoder.models.family import Family, Settings

FAMILIES: Mapping[str, Family] = {
    name: family
    for module in (patches, kimi, tiles, views, dense, whisper)
    for name, family in module.FAMILIES.items()
}
"""By a checkpoint's model type, of a whole model or of its vision tower; else by its architecture."""


@dataclass(frozen=True)
class Architecture:
    """The tower of a published model."""

    title: str
    model_type: str
    """Of its checkpoint, a key of `FAMILIES`."""
    blocks: int
    vision: Callable[[int], dict[str, Any]]
    """Its `vision_config` at a depth; what it leaves out is the configuration class's own value."""
    text_width: int | None = None
    """Of its language model, where the tower depends on it."""

    @property
    def family(self) -> Family:
        """How it is built and fed."""
        return FAMILIES[self.model_type]

    def settings(self, blocks: int | None = None) -> Settings:
        """The model's config.json, as far as the tower goes, at a depth; None: its own.

        Raises:
            InputError: more blocks than the model has, or none.
        """
        depth = self.blocks if blocks is None else blocks
        if not 1 <= depth <= self.blocks:
            raise InputError(f"blocks: expected 1 to {self.blocks}; got {depth}")
        text = {} if self.text_width is None else {"text_config": {"hidden_size": self.text_width}}
        return {**text, "model_type": self.model_type, "vision_config": self.vision(depth)}


def architecture(name: str) -> Architecture:
    """The architecture of a name; raises InputError: no such name."""
    if name not in ARCHITECTURES:
        raise InputError(f"--model {name}: expected one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


# --- published models


def _depth(**settings: Any) -> Callable[[int], dict[str, Any]]:
    return lambda blocks: {**settings, "depth": blocks}


def _layers(**settings: Any) -> Callable[[int], dict[str, Any]]:
    return lambda blocks: {**settings, "num_hidden_layers": blocks}


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


def _deepseek_ocr(blocks: int) -> dict[str, Any]:
    # CLIP's blocks are counted; SAM has half as many, every third of which attends to the whole image.
    layers = (blocks + 1) // 2
    whole = [b for b in range(layers) if b % 3 == 2 or b == layers - 1]
    sam = {"layers": layers, "global_attn_indexes": whole}
    return {"width": {"clip-l-14-224": {"layers": blocks}, "sam_vit_b": sam}}


_INTERNVIT_6B = _layers(
    hidden_size=3200, num_attention_heads=25, intermediate_size=12800, norm_type="rms_norm", use_qk_norm=True
)
_LLAMA4 = _layers(
    hidden_size=1408,
    vision_output_dim=4096,
    image_size=336,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
_SIGLIP = _layers(
    hidden_size=1152, image_size=384, intermediate_size=4304, num_attention_heads=16, patch_size=14
)
_CLIP = _layers(
    hidden_size=1024, image_size=336, intermediate_size=4096, num_attention_heads=16, patch_size=14
)
_DINOV2 = _layers(hidden_size=1024, image_size=518, num_attention_heads=16, patch_size=14)

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3-vl-8b": Architecture("Qwen3-VL-8B", "qwen3_vl", 27, _qwen3_vl),
    "qwen3.5-9b": Architecture("Qwen3.5-9B", "qwen3_5", 27, _depth(out_hidden_size=4096)),
    "qwen3.5-27b": Architecture("Qwen3.5-27B", "qwen3_5", 27, _depth(out_hidden_size=5120)),
    "qwen2.5-vl-3b": Architecture("Qwen2.5-VL-3B", "qwen2_5_vl", 32, _qwen2_5_vl(2048)),
    "qwen2.5-vl-7b": Architecture("Qwen2.5-VL-7B", "qwen2_5_vl", 32, _qwen2_5_vl(3584)),
    "qwen2-vl-2b": Architecture("Qwen2-VL-2B", "qwen2_vl", 32, _depth(hidden_size=1536)),
    "qwen2-vl-7b": Architecture("Qwen2-VL-7B", "qwen2_vl", 32, _depth(hidden_size=3584)),
    "glm-4.1v-9b": Architecture("GLM-4.1V-9B", "glm4v", 24, _depth(intermediate_size=13696)),
    "glm-4.6v": Architecture("GLM-4.6V", "glm46v", 24, _depth(intermediate_size=10944)),
    "kimi-vl-a3b": Architecture("Kimi-VL-A3B", "kimi_vl", 27, _layers(), 2048),
    "kimi-k2.5": Architecture("Kimi-K2.5", "kimi_k25", 27, _layers()),
    "internvl3-8b": Architecture("InternVL3-8B", "internvl", 24, _layers(attention_bias=True), 3584),
    "internvl3-38b": Architecture("InternVL3-38B", "internvl", 45, _INTERNVIT_6B, 5120),
    "llama4": Architecture("Llama 4", "llama4", 34, _LLAMA4, 5120),
    "deepseek-ocr": Architecture("DeepSeek-OCR", "DeepseekOCRForCausalLM", 24, _deepseek_ocr),
    "step3-vl": Architecture("Step3", "step3_vl", 63, _layers(intermediate_size=15360), 7168),
    "step3p7": Architecture("Step-3.7", "step3p7", 47, _layers(), 4096),
    "siglip-so400m-384": Architecture("SigLIP-SO400M-384", "siglip_vision_model", 27, _SIGLIP),
    "clip-l-336": Architecture("CLIP-L-336", "clip_vision_model", 24, _CLIP),
    "dinov2-l-518": Architecture("DINOv2-L-518", "dinov2", 24, _DINOV2),
}
"""Built with random weights at their true sizes, by the name that `--model` takes."""
