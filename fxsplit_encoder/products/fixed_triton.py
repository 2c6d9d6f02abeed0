"""A linear layer in Triton, by one tile whatever the rows. Imported only where Triton is installed.

A program computes one tile of the result and goes through the inner dimension from its start to its end, so
an entry is a sum of the same numbers in the same order among any number of rows. Nothing is tuned.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxsplit_encoder.products.layer import GELU_TANH

# Rows, columns and inner entries of a tile, and the warps that share it. For 16 bits; of 32 bits a tile of
# these sizes does not fit in the memory of a multiprocessor.
_BLOCKS = (128, 128, 64)
_WARPS = 8
_STAGES = 3
_BLOCKS_OF_32_BITS = (64, 64, 32)


# Neither a single row nor a number of them that is a multiple of 16 gets a version of its own.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _product_tile(  # type: ignore[no-untyped-def]
    rows,
    matrix,
    bias,
    out,
    num_rows,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of BLOCK_M rows and BLOCK_N columns; the matrix has INNER_STRIDE from one inner entry to the
    next.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row = (m < num_rows)[:, None]
    is_column = (n < OUT_FEATURES)[None, :]
    row_entries = rows + m.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    matrix_entries = matrix + k.to(tl.int64)[:, None] * INNER_STRIDE + n.to(tl.int64)[None, :] * COLUMN_STRIDE
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, IN_FEATURES, BLOCK_K):
        is_inner = first + k < IN_FEATURES
        left = tl.load(row_entries, mask=is_row & is_inner[None, :], other=0.0)
        right = tl.load(matrix_entries, mask=is_inner[:, None] & is_column, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        row_entries += BLOCK_K
        matrix_entries += BLOCK_K * INNER_STRIDE
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < OUT_FEATURES, other=0.0).to(tl.float32)[None, :]
    if HAS_GELU:
        # 0.5 x (1 + tanh(z)) is x sigmoid(2 z).
        doubled = 1.5957691216057308 * (total + 0.044715 * total * total * total)
        total = total * tl.sigmoid(doubled)
    entries = out + m.to(tl.int64)[:, None] * OUT_FEATURES + n[None, :]
    tl.store(entries, total.to(out.dtype.element_ty), mask=is_row & is_column)


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """rows (M, K), contiguous, times matrix (K, N) of any strides, plus bias (N,), perhaps its GELU: (M, N).
    Sums are in float32.
    """
    count, in_features = rows.shape
    out_features = matrix.shape[1]
    out = torch.empty(count, out_features, dtype=rows.dtype, device=rows.device)
    if count == 0:
        return out
    block_m, block_n, block_k = _BLOCKS if rows.element_size() == 2 else _BLOCKS_OF_32_BITS
    grid = (triton.cdiv(count, block_m), triton.cdiv(out_features, block_n))
    parameters: tuple[Any, ...] = (in_features, out_features, *matrix.stride())
    _product_tile[grid](
        *(rows, matrix, bias if bias is not None else rows, out, count, *parameters),
        *(bias is not None, activation == GELU_TANH, block_m, block_n, block_k),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
