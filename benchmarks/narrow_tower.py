"""A tower for benchmarks on a machine without a GPU: they show there that they run, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

HIDDEN, MLP = 32, 120
"""Widths; that of the MLP is no multiple of 128, as in the real tower."""


def narrow_tower(blocks: int, deepstack: Sequence[int] = (0,)) -> Any:
    """Narrow blocks of Qwen3-VL's vision tower, with the same random weights in every process."""
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(
        depth=blocks,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_heads=2,
        out_hidden_size=HIDDEN,
        deepstack_visual_indexes=list(deepstack),
    )
    return Qwen3VLVisionModel(config).requires_grad_(False).train(False)
