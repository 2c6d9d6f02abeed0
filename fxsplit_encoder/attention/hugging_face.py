"""Our op behind Hugging Face's attention interface, so that a packed tower calls it once a layer.

Transformers takes its variable-length branch (one call a layer, cumulative lengths passed through) only for
implementations whose name contains "flash"; any other name gets one call an image, split on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from transformers import AttentionInterface

from fxsplit_encoder.attention.op import varlen_attention

if TYPE_CHECKING:
    from torch import Tensor, nn

IMPLEMENTATION = "encoder_cg_flash"


def hugging_face_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's signature: (batch, heads, tokens, head_dim) in, (batch, tokens, heads, head_dim) out.

    With cumulative lengths the batch is 1 and the tokens are packed; without them every row of the batch is a sequence.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seq_lens_q is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
        return out.transpose(1, 2), None
    q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    bound = q_THD.shape[0] if max_length_q is None else max_length_q
    return varlen_attention(q_THD, k_THD, v_THD, cu_seq_lens_q, bound, scale).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, hugging_face_attention)


def use_varlen_attention(module: nn.Module) -> None:
    """Routes every attention of a Hugging Face module through `fxsplit::varlen_attention`.

    The submodules get a copy of their configuration first, so that the rest of the model keeps its own implementation.
    """
    import copy

    copies: dict[int, Any] = {}
    for submodule in module.modules():
        config = getattr(submodule, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                # The public setter imports the flash-attn package for such a name.
                copies[id(config)]._attn_implementation_internal = IMPLEMENTATION
            submodule.config = copies[id(config)]
