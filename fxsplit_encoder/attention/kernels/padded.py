"""Heads padded with zeros to a width at which a kernel is faster."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.attention.kernels.base import AttentionKernel, AttentionShape


class PaddedHeads(AttentionKernel):
    """Another kernel behind a padding of head_dim; zeros change neither logits nor outputs.

    Args:
        kernel: what attends.
        multiple: head_dim is padded to the next multiple of this. A shape that is one already is not
            supported, since nothing would be padded.
    """

    def __init__(self, kernel: AttentionKernel, multiple: int) -> None:
        self.kernel = kernel
        self.multiple = multiple
        self.name = f"{kernel.name}_padded"
        self.capturable = kernel.capturable
        self.plans_each_shape = kernel.plans_each_shape

    def unavailable_reason(self, device: torch.device) -> str | None:
        """As the kernel itself."""
        return self.kernel.unavailable_reason(device)

    def supports(self, shape: AttentionShape) -> bool:
        """What the kernel supports at the padded width, where that is another."""
        width = self._width(shape.head_dim)
        return width != shape.head_dim and self.kernel.supports(dataclasses.replace(shape, head_dim=width))

    def _width(self, head_dim: int) -> int:
        return -(-head_dim // self.multiple) * self.multiple

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
        head_dim = query.shape[-1]
        missing = (0, self._width(head_dim) - head_dim)
        q, k, v = (F.pad(x, missing) for x in (query, key, value))
        return self.kernel(q, k, v, cu_seqlens, max_seqlen, scale)[..., :head_dim]
