"""Kernels that need no package but torch: its own, which others must beat, and this library's in Triton."""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder._torch.dispatch import flash_attention, flash_attention_into
from fxsplit_encoder.kernels.attention.attention_kernel import (
    AttentionKernel,
    AttentionShape,
    HalfPrecisionKernel,
    Target,
    as_batch,
)


class TorchFlash(HalfPrecisionKernel):
    """`aten::_flash_attention_forward`, FlashAttention 2, whose tile follows from head_dim alone."""

    name = "torch_flash"
    is_invariant = True

    def package_problem(self, device: torch.device) -> str | None:
        """It comes with torch."""
        return None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        if into is not None and flash_attention_into is not None:
            flash_attention_into(into, q, k, v, *lengths, 0.0, False, False, scale=scale)
            return into
        out: Tensor = flash_attention(q, k, v, *lengths, 0.0, False, False, scale=scale)[0]
        return out


class BatchedDense(AttentionKernel):
    """`scaled_dot_product_attention` over the batch, by whichever of its backends torch prefers."""

    name = "batched_dense"
    needs_equal_segments = True

    def supports(self, shape: AttentionShape) -> bool:
        """Segments that are known to be equal; not on a CPU, where nothing is measured."""
        return shape.equal and shape.device.type != "cpu"

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        count = cu_seqlens.shape[0] - 1
        shape = q.shape
        q, k, v = (as_batch(x, count) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).reshape(shape)


TILE_M, TILE_N = 64, 64
"""Queries of a program of `attention.triton_code`, and keys of a step of it."""


class TritonVarlen(HalfPrecisionKernel):
    """`attention.triton_code`, by tiles for short segments."""

    name = f"triton_{TILE_M}x{TILE_N}"
    module: ClassVar[str] = "fxsplit_encoder.kernels.attention.triton_code"
    attribute: ClassVar[str] = "attend"
    max_head_dim: ClassVar[int] = 128
    is_invariant = True  # one tile, laid from the start of each segment on

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if into is None else into
        self.function(q, k, v, cu_seqlens, scale, out)
        return out


class Masked(AttentionKernel):
    """Dense attention under a block-diagonal mask, without a host read; work grows with tokens squared."""

    name = "masked"
    is_last_resort = True

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        rows = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens.dtype)
        segment_of_row = torch.searchsorted(cu_seqlens[1:], rows, right=True)
        mask = segment_of_row[:, None] == segment_of_row[None, :]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
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

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        return attend_by_segment(q, k, v, cu_seqlens, scale)


def attend_by_segment(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Attends within each segment, one call a segment."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        if end > start:
            # Copied: where a segment lies in the sequence must not show in what BLAS makes of it.
            segment = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in segment)
            is_grouped = q.shape[1] != k.shape[1]
            heads = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=is_grouped)
            out[start:end] = heads.squeeze(0).transpose(0, 1)
    return out
