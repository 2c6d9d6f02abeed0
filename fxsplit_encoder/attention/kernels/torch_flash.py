"""torch's own FlashAttention 2: always there on CUDA, and what others must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import flash_attention, flash_attention_into
from fxsplit_encoder.attention.kernels.base import HalfPrecisionKernel


class TorchFlash(HalfPrecisionKernel):
    """`aten::_flash_attention_forward`. Empty segments and loose bounds cost it thread blocks.

    Its tile follows from head_dim alone, and without a cache of pages it does not split the keys.
    """

    name = "torch_flash"
    is_invariant = True

    def package_problem(self, device: torch.device) -> str | None:
        """It comes with torch."""
        return None

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
        if target is not None and flash_attention_into is not None:
            flash_attention_into(target, query, key, value, *lengths, 0.0, False, False, scale=scale)
            return target
        out: Tensor = flash_attention(query, key, value, *lengths, 0.0, False, False, scale=scale)[0]
        return out
