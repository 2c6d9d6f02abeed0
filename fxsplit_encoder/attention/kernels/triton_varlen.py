"""Our own kernel: for short segments, whose tiles the others make too large for a whole GPU."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fxsplit_encoder.attention.kernels.base import HalfPrecisionKernel

_STAGES = 3


class TritonVarlen(HalfPrecisionKernel):
    """`attention.kernels.triton_code`, with one size of tiles.

    At 196 tokens and 16 heads of 72, tiles of 64 queries make 64 programs for the 132 multiprocessors of an
    H200 and tiles of 192, 32. Where segments are long, kernels that specialize warps are faster.

    Args:
        block_m: queries of a tile.
        block_n: keys of a step.
        num_warps: warps that share a tile.
    """

    module: ClassVar[str] = "fxsplit_encoder.attention.kernels.triton_code"
    attribute: ClassVar[str] = "attend"
    max_head_dim: ClassVar[int] = 128

    def __init__(self, block_m: int, block_n: int, num_warps: int) -> None:
        self.name = f"triton_{block_m}x{block_n}"
        self.block_m = block_m
        self.block_n = block_n
        self.num_warps = num_warps

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
        out = torch.empty_like(query, memory_format=torch.contiguous_format) if target is None else target
        self.function(
            query,
            key,
            value,
            cu_seqlens,
            scale,
            out,
            block_m=self.block_m,
            block_n=self.block_n,
            num_warps=self.num_warps,
            num_stages=_STAGES,
        )
        return out
