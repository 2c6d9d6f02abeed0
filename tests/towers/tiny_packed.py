"""Packed towers with tiny sizes: patches of PATCH x PATCH pixels, in a token 2 x 2 of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.exaone4_5.modeling_exaone4_5 import Exaone4_5_VisionModel
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeVisionConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder
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

from fxsplit_encoder.models.encoders.moonvit import KimiVLVisionConfig, KimiVLVisionModel

PATCH = 4
"""Pixels a side of a patch of the packed towers."""

# --- the Qwen line: 24 features a token


def qwen2_vl(blocks: int = 1) -> nn.Module:
    config = Qwen2VLVisionConfig(depth=blocks, embed_dim=32, hidden_size=24, num_heads=2, patch_size=PATCH)
    return Qwen2VisionTransformerPretrainedModel(config)


QWEN25_WINDOW = 4
"""Output tokens a side of a window."""


def qwen2_5_vl(
    blocks: int = 2, kind: Any = Qwen2_5_VisionTransformerPretrainedModel, **sizes: int
) -> nn.Module:
    """The second block attends over whole frames."""
    config = kind.config_class(
        depth=blocks,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=24,
        patch_size=PATCH,
        window_size=QWEN25_WINDOW * 2 * PATCH,
        fullatt_block_indexes=[1],
        **sizes,
    )
    model: nn.Module = kind(config)
    return model


def qwen2_5_omni() -> nn.Module:
    return qwen2_5_vl(kind=Qwen2_5OmniVisionEncoder)


def exaone() -> nn.Module:
    """With fewer heads of keys than of queries."""
    return qwen2_5_vl(kind=Exaone4_5_VisionModel, num_key_value_heads=1)


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


# --- others


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


def raster_patches(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, PATCH, PATCH, generator=torch.Generator().manual_seed(seed))


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
