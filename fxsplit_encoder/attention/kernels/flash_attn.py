"""The FlashAttention packages of their authors: generations 2, 3 and 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxsplit_encoder.attention.kernels.base import HalfPrecisionKernel

if TYPE_CHECKING:
    from torch import Tensor


class FlashAttention2(HalfPrecisionKernel):
    """`flash_attn`."""

    name = "flash_attn_2"
    module = "flash_attn"
    attribute = "flash_attn_varlen_func"

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
        lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        out = self.function(query, key, value, *lengths, softmax_scale=scale)
        # Before version 3.0.0's last beta, generation 3 returned the logarithms of the sums too.
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


class FlashAttention3(FlashAttention2):
    """`flash_attn_3`, whose module is `flash_attn_interface` and which runs on Hopper."""

    name = "flash_attn_3"
    module = "flash_attn_interface"
    architectures = (9,)


class FlashAttention4(HalfPrecisionKernel):
    """`flash-attn-4`: compiled when first called, once for each variant that a shape may need.

    Args:
        tile: queries and keys of a step, on Hopper; None: the package's own choice, which is made for long
            segments.
    """

    module = "flash_attn.cute.interface"
    # The public function has no way to say where to write; torch's own adapter calls this one too.
    attribute = "_flash_attn_fwd"
    max_head_dim = 128

    def __init__(self, tile: tuple[int, int] | None = None) -> None:
        self.tile = tile
        self.name = "flash_attn_4" if tile is None else f"flash_attn_4_{tile[0]}x{tile[1]}"
        self.architectures = (9, 10, 11) if tile is None else (9,)

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
        result: Tensor = self.function(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=scale,
            tile_mn=self.tile,
            out=target,
        )[0]
        return result if target is None else target
