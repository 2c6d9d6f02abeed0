"""vLLM's attention of a CPU for padded sequences, as its kernels of a GPU do it.

vLLM's own splits the rows by the cumulative lengths, which fails where rows follow after the last. This one
attends within each segment and leaves the other rows as they come. It is an op, so that captures record it.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@torch.library.custom_op("fxsplit_encoder_benchmarks::padded_attention", mutates_args=())
def padded_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor) -> Tensor:
    """(batch, rows, heads, width) each; rows outside every segment are NaN."""
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        if start < end:
            rows = slice(start, end)
            segment = (each[:, rows].transpose(1, 2) for each in (q, k, v))
            out[:, rows] = scaled_dot_product_attention(*segment, scale=scale).transpose(1, 2)
    return out


@padded_attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def use_padded_attention() -> None:
    """In place of vLLM's own, for every encoder attention over segments of one length of keys and queries."""
    from vllm.model_executor.layers.attention import mm_encoder_attention

    own = mm_encoder_attention.vit_torch_sdpa_wrapper

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        cu_seqlens: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if cu_seqlens is None:
            return own(q, k, v, scale, cu_seqlens, enable_gqa)
        assert scale is not None
        assert not enable_gqa
        return torch.nan_to_num(padded_attention(q, k, v, scale, cu_seqlens))

    mm_encoder_attention.vit_torch_sdpa_wrapper = attend
