"""Equal segments as a batch: what the host must know, and then no cumulative lengths are needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.attention.kernels.base import (
    AttentionKernel,
    AttentionShape,
    as_batch,
)


class BatchedDense(AttentionKernel):
    """`scaled_dot_product_attention` over the batch, by whichever of its backends torch prefers."""

    name = "batched_dense"
    needs_equal_segments = True

    def unavailable_reason(self, device: torch.device) -> str | None:
        """It comes with torch, for every device."""
        return None

    def supports(self, shape: AttentionShape) -> bool:
        """Any dtype and head_dim, where all segments are known to be equally long; on a CPU, where nothing is
        measured, one kernel does for all.
        """
        return shape.equal and shape.device.type != "cpu"

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
        count = cu_seqlens.shape[0] - 1
        q, k, v = (as_batch(x, count) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return out.transpose(1, 2).reshape(query.shape)
