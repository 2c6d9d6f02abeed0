"""Every registered tower class with tiny sizes and random weights.

A class that is registered needs an entry of its own in `TINY`; `test_conformance.py` then tests it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeVisionConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel
from transformers.models.internvl.configuration_internvl import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLForConditionalGeneration, InternVLModel
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel
from transformers.models.llama4.configuration_llama4 import Llama4Config, Llama4VisionConfig
from transformers.models.llama4.modeling_llama4 import Llama4ForConditionalGeneration, Llama4VisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel
from transformers.models.step3p7.configuration_step3p7 import Step3p7Config, Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Model, Step3p7VisionModel

from fxsplit_encoder.towers.models.clip_encoder import ClipConfig
from fxsplit_encoder.towers.models.deepseek_encoder import DeepseekOcrConfig, DeepseekOcrVisionModel
from fxsplit_encoder.towers.models.moonvit import KimiVLVisionConfig, KimiVLVisionModel
from fxsplit_encoder.towers.models.sam import SamConfig
from fxsplit_encoder.towers.models.step3_vision import Step3VisionConfig, Step3VisionModel

from .random_weights import randomise
from .tiny_inputs import Inputs, PackedInputs, TileInputs, ViewInputs

PATCH = 4
"""Pixels a side of a patch of the packed towers."""

# --- packed towers of the Qwen line: 24 features a token


def qwen2_vl(blocks: int = 1) -> nn.Module:
    config = Qwen2VLVisionConfig(depth=blocks, embed_dim=32, hidden_size=24, num_heads=2, patch_size=PATCH)
    return Qwen2VisionTransformerPretrainedModel(config)


QWEN25_WINDOW = 4
"""Output tokens a side of a window."""


def qwen2_5_vl(blocks: int = 2) -> nn.Module:
    """The second block attends over whole frames."""
    config = Qwen2_5_VLVisionConfig(
        depth=blocks,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=24,
        patch_size=PATCH,
        window_size=QWEN25_WINDOW * 2 * PATCH,
        fullatt_block_indexes=[1],
    )
    return Qwen2_5_VisionTransformerPretrainedModel(config)


def _qwen3_sizes(blocks: int) -> dict[str, Any]:
    return {
        "depth": blocks,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 24,
        "patch_size": PATCH,
        "num_position_embeddings": 49,
    }


def qwen3_vl(blocks: int = 1, *, moe: bool = False) -> nn.Module:
    """With deepstack behind its first block."""
    sizes = {**_qwen3_sizes(blocks), "deepstack_visual_indexes": [0]}
    if moe:
        return Qwen3VLMoeVisionModel(Qwen3VLMoeVisionConfig(**sizes))
    return Qwen3VLVisionModel(Qwen3VLVisionConfig(**sizes))


def qwen3_5(blocks: int = 1, *, moe: bool = False) -> nn.Module:
    if moe:
        return Qwen3_5MoeVisionModel(Qwen3_5MoeVisionConfig(**_qwen3_sizes(blocks)))
    return Qwen3_5VisionModel(Qwen3_5VisionConfig(**_qwen3_sizes(blocks)))


# --- other packed towers


def glm4v(blocks: int = 1, *, moe: bool = False) -> nn.Module:
    sizes = {
        "depth": blocks,
        "hidden_size": 32,
        "num_heads": 2,
        "image_size": 6 * PATCH,
        "patch_size": PATCH,
        "out_hidden_size": 24,
        "intermediate_size": 48,
    }
    if moe:
        return Glm4vMoeVisionModel(Glm4vMoeVisionConfig(**sizes))
    return Glm4vVisionModel(Glm4vVisionConfig(**sizes))


KIMI_HIDDEN, KIMI_TEXT = 48, 40


def kimi_vl_config(blocks: int = 1) -> KimiVLVisionConfig:
    return KimiVLVisionConfig(
        hidden_size=KIMI_HIDDEN,
        num_attention_heads=4,
        num_hidden_layers=blocks,
        patch_size=PATCH,
        intermediate_size=80,
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        text_hidden_size=KIMI_TEXT,
    )


def kimi_vl(blocks: int = 1) -> nn.Module:
    return KimiVLVisionModel(kimi_vl_config(blocks))


def kimi_k25(blocks: int = 1) -> nn.Module:
    config = Kimi_K25VisionConfig(
        num_hidden_layers=blocks,
        hidden_size=KIMI_HIDDEN,
        num_attention_heads=4,
        intermediate_size=80,
        pos_emb_height=8,
        pos_emb_width=8,
        patch_size=PATCH,
    )
    return Kimi_K25VisionModel(config)


# --- towers of equal tiles: 16 x 16 pixels, 4 tokens


def text_config(**sizes: Any) -> dict[str, Any]:
    """The least that a language model can be made with."""
    return {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        **sizes,
    }


INTERNVL_TEXT = 12


def internvl_config(vision: dict[str, Any], blocks: int = 1, **options: Any) -> InternVLConfig:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": blocks,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": (16, 16),
        "patch_size": (4, 4),
    }
    text = text_config(model_type="qwen2", hidden_size=INTERNVL_TEXT, intermediate_size=8)
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return InternVLConfig(vision_config={**sizes, **vision}, text_config={**text, **no_tokens}, **options)


def internvl(blocks: int = 1) -> nn.Module:
    return InternVLModel(internvl_config({}, blocks))


def internvl_with_head(blocks: int = 1) -> nn.Module:
    return InternVLForConditionalGeneration(internvl_config({}, blocks))


def llama4_sizes(blocks: int = 1) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_hidden_layers": blocks,
        "num_attention_heads": 2,
        "intermediate_size": 128,  # of the pixel shuffle: four patches
        "projector_input_dim": 24,
        "projector_output_dim": 24,
        "vision_output_dim": 24,
        "image_size": 16,
        "patch_size": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def llama4(blocks: int = 1) -> nn.Module:
    experts = {"intermediate_size": 8, "intermediate_size_mlp": 8, "num_local_experts": 1, "head_dim": 6}
    text = text_config(hidden_size=12, pad_token_id=0, **experts)
    return Llama4ForConditionalGeneration(Llama4Config(vision_config=llama4_sizes(blocks), text_config=text))


def llama4_tower(blocks: int = 1) -> nn.Module:
    return Llama4VisionModel(Llama4VisionConfig(**llama4_sizes(blocks)))


# --- towers that see an image as a whole and as crops


def deepseek_ocr_config(layers: int = 1, **sizes: int) -> DeepseekOcrConfig:
    """Whole images have the stored positions' grid (16 x 16 patches), crops another (12 x 12); neither is a
    multiple of the window. The second of SAM's layers attends over all of it.
    """
    return DeepseekOcrConfig(
        **{"base_size": 64, "image_size": 48, "out_hidden_size": 24, **sizes},
        sam=SamConfig(
            image_size=64,
            patch_size=4,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            mlp_size=48,
            window_size=5,
            global_layers=(1,),
            neck_channels=12,
            downsample_channels=(16, 20),
        ),
        clip=ClipConfig(
            image_size=28, patch_size=7, hidden_size=20, num_layers=layers, num_heads=2, mlp_size=40
        ),
    )


def step3_config(layers: int = 1) -> Step3VisionConfig:
    """Whole images have the stored positions' grid (8 x 8 patches), crops a smaller one (6 x 6)."""
    return Step3VisionConfig(
        image_size=32,
        crop_size=24,
        patch_size=4,
        hidden_size=32,
        num_layers=layers,
        num_heads=2,
        mlp_size=48,
        downsample_channels=40,
        out_hidden_size=24,
    )


def step3p7_sizes(blocks: int = 1) -> dict[str, Any]:
    """Large patches, since the sizes of images are fixed: 13 x 13 of a whole one, 9 x 9 of a crop."""
    return {
        "hidden_size": 32,
        "num_hidden_layers": blocks,
        "num_attention_heads": 2,
        "image_size": 728,
        "patch_size": 56,
        "mlp_ratio": 1.5,
    }


def step3p7(blocks: int = 1) -> nn.Module:
    text = text_config(
        hidden_size=24,
        intermediate_size=8,
        moe_intermediate_size=8,
        share_expert_dim=8,
        moe_num_experts=2,
        moe_top_k=1,
        head_dim=12,
        num_attention_groups=1,
    )
    return Step3p7Model(Step3p7Config(vision_config=step3p7_sizes(blocks), text_config=text))


def step3p7_tower(blocks: int = 1) -> nn.Module:
    return Step3p7VisionModel(Step3p7VisionConfig(**step3p7_sizes(blocks)))


# --- the mapping


@dataclass(frozen=True)
class Tiny:
    """One registered class."""

    make: Callable[[], nn.Module]
    inputs: Inputs
    unproved: str = ""
    """What the padding analysis says, if it does not prove that rows are independent."""


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
    "Glm4vMoeVisionModel": Tiny(lambda: glm4v(moe=True), QWEN),
    "Glm4vVisionModel": Tiny(glm4v, QWEN),
    "InternVLForConditionalGeneration": Tiny(internvl_with_head, TileInputs(videos=((2,), (3,)))),
    "InternVLModel": Tiny(internvl, TileInputs(videos=((2,), (3,)))),
    "KimiVLVisionModel": Tiny(
        kimi_vl,
        PackedInputs(RASTER, ("pixel_values", "image_grid_hws"), sizes_with_frames=False, videos=()),
    ),
    "Kimi_K25VisionModel": Tiny(kimi_k25, PackedInputs(RASTER, pooled=True)),
    "Llama4ForConditionalGeneration": Tiny(llama4, TileInputs()),
    "Llama4VisionModel": Tiny(llama4_tower, TileInputs()),
    "Qwen2VisionTransformerPretrainedModel": Tiny(qwen2_vl, QWEN),
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
    """The entry of a registered class; fails the test if there is none."""
    if name not in TINY:
        pytest.fail(
            f"{name} is registered and not tested: add it to TINY in tests/towers/tiny_towers.py (a function "
            "that makes one with tiny sizes, and its inputs) and to COUNTS in tests/towers/token_counts.py"
        )
    return TINY[name]


def make(name: str) -> Any:
    """A tower of a registered class, with random weights."""
    return randomise(tiny(name).make())
