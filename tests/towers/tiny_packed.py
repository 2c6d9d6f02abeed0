"""Packed towers with tiny sizes: patches of PATCH x PATCH pixels, in a token 2 x 2 of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.exaone4_5.modeling_exaone4_5 import Exaone4_5_VisionModel
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from fxsplit_encoder.models.encoders.moonvit import KimiVLVisionConfig, KimiVLVisionModel

PATCH = 4
"""Pixels a side of a patch of the packed towers."""


def made(kind: Any, blocks: int, **sizes: Any) -> nn.Module:
    """A tower of a class that knows its configuration's."""
    model: nn.Module = kind(kind.config_class(depth=blocks, num_heads=2, patch_size=PATCH, **sizes))
    return model


# --- 24 features a token


def qwen2_vl(blocks: int = 1) -> nn.Module:
    return made(Qwen2VisionTransformerPretrainedModel, blocks, embed_dim=32, hidden_size=24)


QWEN25_WINDOW = 4
"""Output tokens a side of a window."""


def qwen2_5_vl(
    blocks: int = 2, kind: Any = Qwen2_5_VisionTransformerPretrainedModel, **sizes: int
) -> nn.Module:
    """The second block attends over whole frames."""
    window: dict[str, Any] = dict(window_size=QWEN25_WINDOW * 2 * PATCH, fullatt_block_indexes=[1])
    return made(kind, blocks, hidden_size=32, intermediate_size=48, out_hidden_size=24, **window, **sizes)


def qwen2_5_omni() -> nn.Module:
    return qwen2_5_vl(kind=Qwen2_5OmniVisionEncoder)


def exaone() -> nn.Module:
    """With fewer heads of keys than of queries."""
    return qwen2_5_vl(kind=Exaone4_5_VisionModel, num_key_value_heads=1)


_QWEN3 = dict(hidden_size=32, intermediate_size=64, out_hidden_size=24, num_position_embeddings=49)


def qwen3_vl(blocks: int = 1, *, moe: bool = False) -> nn.Module:
    """With deepstack behind its first block."""
    kind = Qwen3VLMoeVisionModel if moe else Qwen3VLVisionModel
    return made(kind, blocks, **_QWEN3, deepstack_visual_indexes=[0])


def qwen3_5(blocks: int = 1, *, moe: bool = False) -> nn.Module:
    return made(Qwen3_5MoeVisionModel if moe else Qwen3_5VisionModel, blocks, **_QWEN3)


def glm4v(blocks: int = 1, *, moe: bool = False) -> nn.Module:
    kind = Glm4vMoeVisionModel if moe else Glm4vVisionModel
    sizes = dict(hidden_size=32, image_size=6 * PATCH, out_hidden_size=24, intermediate_size=48)
    return made(kind, blocks, **sizes)


# --- Kimi


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
    config = Kimi_K25VisionModel.config_class(
        num_hidden_layers=blocks,
        hidden_size=KIMI_HIDDEN,
        num_attention_heads=4,
        intermediate_size=80,
        pos_emb_height=8,
        pos_emb_width=8,
        patch_size=PATCH,
    )
    return Kimi_K25VisionModel(config)
