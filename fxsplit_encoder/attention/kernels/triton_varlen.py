"""Our own kernel: for short segments, whose tiles the others make too large for a whole GPU."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fxsplit_encoder.attention.kernels.base import HalfPrecisionKernel

_STAGES = 3


class Tile(NamedTuple):
    """What one program of the kernel computes, and how."""

    block_m: int
    """Queries."""
    block_n: int
    """Keys of a step."""
    num_warps: int
    """Warps that share the tile."""
    num_stages: int
    """Steps whose loads overlap."""


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
    is_invariant = True  # one tile, laid from the start of each segment on

    def __init__(self, block_m: int, block_n: int, num_warps: int) -> None:
        self.name = f"triton_{block_m}x{block_n}"
        self.tile = Tile(block_m, block_n, num_warps, _STAGES)

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
        self.function(query, key, value, cu_seqlens, scale, out, self.tile)
        return out
