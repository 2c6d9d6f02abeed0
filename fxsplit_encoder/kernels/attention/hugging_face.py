"""Our op behind Hugging Face's attention interface, called once per layer by packed towers.

Only an implementation with "flash" in its name gets cumulative lengths; others are called once per image.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder._torch.transformers import has_attention_implementation, set_attention_implementation
from fxsplit_encoder.errors import UnsupportedTowerError
from fxsplit_encoder.kernels.attention.op import varlen_attention

IMPLEMENTATION = "encoder_cg_flash"


def hugging_face_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attends: (batch, heads, tokens, head_dim) in, (batch, tokens, heads, head_dim) out.
    UnsupportedTowerError: packed attention that is causal.

    Args:
        cu_seq_lens_q: (segments + 1,) int32 cumulative lengths of a batch of 1; None: "sdpa" of the batch.
        options: packed attention reads `scaling`, `max_length_q` and `is_causal`.
    """
    if cu_seq_lens_q is None:
        sdpa: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return sdpa
    is_causal = options.get("is_causal")
    if getattr(module, "is_causal", False) if is_causal is None else is_causal:
        raise UnsupportedTowerError(
            f"{type(module).__name__} asks for causal attention over packed segments; "
            "fxsplit::varlen_attention attends in both directions"
        )
    scaling, longest = options.get("scaling"), options.get("max_length_q")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    bound = q_THD.shape[0] if longest is None else longest
    return varlen_attention(q_THD, k_THD, v_THD, cu_seq_lens_q, bound, scale).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, hugging_face_attention)


class _Routes:
    """Replaces the attention of modules, and keeps the configurations that they had before."""

    def __init__(self) -> None:
        self.replaced: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def route(self, module: nn.Module, implementation: str) -> None:
        """Submodules get a copy of their configuration: the rest of the model keeps its implementation."""
        copies: dict[int, Any] = {}
        for submodule in module.modules():
            config = getattr(submodule, "config", None)
            if has_attention_implementation(config):
                if id(config) not in copies:
                    copies[id(config)] = copy.copy(config)
                    set_attention_implementation(copies[id(config)], implementation)
                self.replaced.setdefault(submodule, config)
                submodule.config = copies[id(config)]


_routes = _Routes()


def use_varlen_attention(module: nn.Module) -> None:
    """Routes every attention of a Hugging Face module through `fxsplit::varlen_attention`."""
    _routes.route(module, IMPLEMENTATION)


def use_dense_attention(module: nn.Module) -> None:
    """Routes every attention of a Hugging Face module through `torch`'s scaled_dot_product_attention."""
    _routes.route(module, "sdpa")


def with_own_attention(module: nn.Module) -> nn.Module:
    """A module on the same parameters with its own attention, for results that only that one gives."""
    twin = linked_copy(module)
    for routed, own in zip(module.modules(), twin.modules(), strict=True):
        if routed in _routes.replaced:
            own.config = _routes.replaced[routed]
    return twin
