"""Triton kernels of `products`: a linear layer by one tile, and SwiGLU. Imported only with Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """One tile of BLOCK_M rows and BLOCK_N columns, summed in the same order among any number of rows."""
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


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None, *, gelu: bool) -> Tensor:
    """Contiguous rows (M, K) times matrix (K, N) plus bias (N,), perhaps its GELU, summed in float32."""
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
        *(bias is not None, gelu, block_m, block_n, block_k),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out


# Four results, 16 bytes of pairs, for each of the threads of four warps, twice.
_PAIRS = 1024
_PAIR_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(pairs, result, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * BLOCK
    pair = 2 * first + tl.arange(0, 2 * BLOCK)
    values = tl.load(pairs + pair, mask=pair < 2 * count, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(values, (BLOCK, 2)))
    entry = first + tl.arange(0, BLOCK)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(result + entry, gated.to(result.dtype.element_ty), mask=entry < count)


def swiglu(values: Tensor) -> Tensor:
    """silu(gate) * up of contiguous (rows, 2 * features), gate, up, gate, up: (rows, features)."""
    result = values.new_empty(values.shape[0], values.shape[1] // 2)
    if count := result.numel():
        _swiglu[(triton.cdiv(count, _PAIRS),)](values, result, count, _PAIRS, num_warps=_PAIR_WARPS)
    return result
