"""Towers of equal tiles with tiny sizes: 16 x 16 pixels, 4 tokens."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.internvl.configuration_internvl import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLForConditionalGeneration, InternVLModel
from transformers.models.llama4.configuration_llama4 import Llama4Config, Llama4VisionConfig
from transformers.models.llama4.modeling_llama4 import Llama4ForConditionalGeneration, Llama4VisionModel

INTERNVL_TEXT = 12


def text_config(**sizes: Any) -> dict[str, Any]:
    """The least that a language model can be made with."""
    return {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        **sizes,
    }


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
