"""A linear layer by cuBLASLt, which is told not to split it along the inner dimension.

Its GELU is torch's, after the product: with a GELU in its epilogue cuBLASLt passed every trial
(`products.verified`) and gave other bits at some counts of more and other rows, on an H200.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fxsplit_encoder._torch.cublas import split_k_forbidden
from fxsplit_encoder.products.layer import activated


def library_product(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The layer on CUDA. What has no bias gets one of zeros: only sums go to cuBLASLt, and cuBLAS cannot be
    told what cuBLASLt can.

    Raises:
        RuntimeError: neither takes this layer unsplit.
    """
    added = bias if bias is not None else _zeros(matrix.shape[1], rows.dtype, rows.device)
    with split_k_forbidden(rows.dtype):
        product = torch.addmm(added, rows, matrix)
    return activated(product, activation)


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept: graphs hold its address."""
    return torch.zeros(size, dtype=dtype, device=device)
