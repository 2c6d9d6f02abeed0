"""Matrix products of `benchmarks/passes.py`: the ways to multiply, and a Triton kernel among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fxsplit_encoder.compile.passes  # noqa: F401  (registers the operations)
from fxsplit_encoder.compile.passes.fp8_linear import quantize_rows
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_columns, pad_rows

# Rows and columns of a tile, depth of a step, parts of the depth, warps, stages.
TILES = ((64, 64, 64, 1, 4, 4), (128, 128, 64, 1, 8, 3), (64, 64, 64, 4, 4, 4), (128, 64, 64, 3, 4, 4))


@contextmanager
def blas_library(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def ways(rows: Tensor, weight: Tensor, bias: Tensor, *, gelu: bool, padded: int | None) -> dict[str, Any]:
    """Name -> a function without arguments that computes the layer; `padded`: the MLP's padded width."""
    matrix = weight.t()
    quantized, scales = quantize_rows(rows)
    small, small_scales = quantize_rows(weight)
    quantize = torch.compile(quantize_rows) if rows.is_cuda else quantize_rows

    def fp8(given: tuple[Tensor, Tensor]) -> Tensor:
        return torch.ops.fxsplit.linear_fp8(*given, small, small_scales, bias, rows.dtype)

    def in_library(name: str) -> Tensor:
        with blas_library(name):
            return torch.addmm(bias, rows, matrix)

    found: dict[str, Callable[[], Any]] = {
        "default": lambda: torch.addmm(bias, rows, matrix),
        "cublas": lambda: in_library("cublas"),
        "cublaslt": lambda: in_library("cublaslt"),
        "fp8": lambda: fp8((quantized, scales)),
        "fp8 with its rows": lambda: fp8(quantize(rows)),
    }
    if gelu:
        found["default, then gelu"] = lambda: F.gelu(torch.addmm(bias, rows, matrix), approximate="tanh")
        found["gelu epilogue"] = lambda: torch.ops.fxsplit.addmm_gelu(bias, rows, matrix)
    if padded is not None and padded > weight.shape[0] and gelu:
        wide, wide_bias = pad_rows(weight, padded).t(), pad_rows(bias, padded)
        found["padded"] = lambda: torch.addmm(wide_bias, rows, wide)
        found["padded, gelu epilogue"] = lambda: torch.ops.fxsplit.addmm_gelu(wide_bias, rows, wide)
    elif padded is not None:
        deep_rows, deep = pad_columns(rows, padded), pad_columns(weight, padded).t()
        found["padded"] = lambda: torch.addmm(bias, deep_rows, deep)
    for tile in TILES:
        found[f"triton {' x '.join(map(str, tile[:4]))}"] = lambda tile=tile: triton_linear(
            rows, weight, bias, tile
        )
    return found


def triton_linear(rows: Tensor, weight: Tensor, bias: Tensor, tile: tuple[int, ...]) -> Tensor:
    """rows (M, K) @ weight (N, K).T + bias, by a persistent kernel; with several parts of the depth, their
    sums are added by another kernel.
    """
    import triton

    block_m, block_n, block_k, parts, warps, stages = tile
    (m, k), n = rows.shape, weight.shape[0]
    sums = rows.new_empty((parts, m, n), dtype=torch.float32 if parts > 1 else rows.dtype)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n) * parts
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    kernel: Any = _kernel()
    kernel[(min(tiles, processors),)](
        rows,
        weight,
        bias,
        sums,
        m,
        n,
        k,
        rows.stride(0),
        weight.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PARTS=parts,
        num_warps=warps,
        num_stages=stages,
    )
    return sums[0] if parts == 1 else (sums.sum(0) + bias).to(rows.dtype)


_made: list[Any] = []


def _kernel() -> Any:
    """The kernel, made where there is a GPU: Triton is not installed elsewhere."""
    if not _made:
        import triton_kernels

        _made.append(triton_kernels.persistent_linear)
    return _made[0]
