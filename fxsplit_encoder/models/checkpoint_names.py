"""Checkpoints published under other names than their tower has: names, fused projections, rotary pairs.

The renamings say what transformers' own loader, which loads whole models only, does for these model types
(`transformers.conversion_mapping`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

Renames = Sequence[tuple[str, str]]
"""(pattern, replacement), applied one after the other."""

KIMI_K25: Renames = (
    (r"^encoder\.", ""),
    (r"^blocks\.(\d+)\.norm1\.", r"layers.\1.norm2."),
    (r"^blocks\.(\d+)\.norm0\.", r"layers.\1.norm1."),
    (r"^blocks\.(\d+)\.mlp\.fc1\.", r"layers.\1.mlp.fc2."),
    (r"^blocks\.(\d+)\.mlp\.fc0\.", r"layers.\1.mlp.fc1."),
    (r"^blocks\.(\d+)\.wo\.", r"layers.\1.attn.proj."),
    (r"^blocks\.(\d+)\.wqkv\.", r"layers.\1.attn.qkv."),
    (r"^blocks\.", "layers."),
    (r"^patch_embed\.pos_emb\.weight$", "patch_embed.pos_emb.position_embeddings"),
)

# After the prefix of the vision model, if the checkpoint is that of the whole model.
STEP3P7: Renames = (
    (r"^vit_large_projector\.", "multi_modal_projector."),
    (r"(^|\.)conv1\.weight$", r"\1embeddings.patch_embedding.weight"),
    (r"(^|\.)positional_embedding$", r"\1embeddings.position_embedding.weight"),
    (r"(^|\.)transformer\.resblocks\.", r"\1layers."),
    (r"(^|\.)ln_pre\.", r"\1pre_layernorm."),
    (r"(^|\.)vit_downsampler([12])\.", r"\1downsampler\2."),
    (r"\.ls_([12])\.gamma$", r".lambda_\1"),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.attn\.in_proj_", ".self_attn.qkv."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ln_1\.", ".layernorm_before."),
    (r"\.ln_2\.", ".layernorm_after."),
)

Convert = Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]
"""From tensors under renamed names, and the number of attention heads, to the tower's."""


def rename(name: str, renames: Renames) -> str:
    """A tensor's name in the tower; one that is the tower's already stays."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def split_fused(tensors: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Fused projections (`qkv`) as three, those of queries and keys in the order of split rotary halves.

    The checkpoint rotates neighbouring channels of a head together, the tower the two halves of a head: the
    even channels come first, then the odd ones.
    """
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".qkv." not in name:
            split[name] = tensor
            continue
        query, key, value = tensor.chunk(3)
        parts = {"q_proj": _halves(query, num_heads), "k_proj": _halves(key, num_heads), "v_proj": value}
        split.update({name.replace(".qkv.", f".{part}."): own for part, own in parts.items()})
    return split


def _halves(projection: Tensor, num_heads: int) -> Tensor:
    pairs = projection.view(num_heads, -1, 2, *projection.shape[1:])
    return pairs.transpose(1, 2).reshape(projection.shape)
