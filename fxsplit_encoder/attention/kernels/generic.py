"""Slow kernels that always work: one for CUDA, one for the CPU."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.attention.kernels.base import AttentionKernel, AttentionShape


class Masked(AttentionKernel):
    """Dense attention under a block-diagonal mask: needs nothing of the device, and no host read.

    Memory and work grow with tokens squared, whatever the segments.
    """

    name = "masked"
    is_last_resort = True

    def unavailable_reason(self, device: torch.device) -> str | None:
        """It comes with torch, for every device."""
        return None

    def supports(self, shape: AttentionShape) -> bool:
        """Everything."""
        return True

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        target: Tensor | None,
    ) -> Tensor:
        rows = torch.arange(query.shape[0], device=query.device, dtype=cu_seqlens.dtype)
        segment_of_row = torch.searchsorted(cu_seqlens[1:], rows, right=True)
        mask = segment_of_row[:, None] == segment_of_row[None, :]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.squeeze(0).transpose(0, 1)


class PerSegment(AttentionKernel):
    """One scaled_dot_product_attention per segment: the boundaries are read on the host."""

    name = "per_segment"
    is_last_resort = True
    is_invariant = True
    capturable = False

    def unavailable_reason(self, device: torch.device) -> str | None:
        """On a GPU every call would wait for the device."""
        return None if device.type == "cpu" else "reads the boundaries on the host: for the CPU only"

    def supports(self, shape: AttentionShape) -> bool:
        """Everything."""
        return True

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        target: Tensor | None,
    ) -> Tensor:
        return _attend_by_segment(query, key, value, cu_seqlens, scale)


def _attend_by_segment(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        if end > start:
            # Copied: where a segment lies in the sequence must not show in what BLAS makes of it.
            q, k, v = (_aligned(x[start:end]) for x in (query, key, value))
            out[start:end] = F.scaled_dot_product_attention(q, k, v, scale=scale).squeeze(0).transpose(0, 1)
    return out


def _aligned(segment_THD: Tensor) -> Tensor:
    """(1, heads, tokens, head_dim), in memory of its own."""
    return segment_THD.transpose(0, 1).unsqueeze(0).clone(memory_format=torch.contiguous_format)
