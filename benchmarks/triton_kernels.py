"""Triton kernels that the benchmarks compare with."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def persistent_linear(
    rows,
    weight,
    bias,
    out,
    M,
    N,
    K,
    row_stride,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """out[part] = rows @ weight.T over one part of K; the bias is added where there is one part.

    Every program takes tiles until none is left; neighbours share the columns of the weight.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles = tiles_m * tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS)
    for number in range(tl.program_id(0), tiles * PARTS, tl.num_programs(0)):
        part = number // tiles
        tile = number % tiles
        m = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
        first = part * steps * BLOCK_K
        # Rows past the end are read from the first row, and never written.
        row = tl.where(m < M, m, 0)
        column = tl.where(n < N, n, 0)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
            a = tl.load(rows + row[:, None] * row_stride + k[None, :], mask=k[None, :] < K, other=0.0)
            b = tl.load(weight + column[None, :] * weight_stride + k[:, None], mask=k[:, None] < K, other=0.0)
            total = tl.dot(a, b, total)
        if PARTS == 1:
            total += tl.load(bias + column).to(tl.float32)[None, :]
        place = out + part * M * N + m[:, None] * N + n[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
