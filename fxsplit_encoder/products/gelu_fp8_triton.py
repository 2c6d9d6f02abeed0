"""The GELU of a product in fp8, as the operand of the next, in Triton. Imported only where that is installed.

A program computes one row, in blocks, so that no lanes stay empty whatever the width. The second time its
entries come from the cache. Nothing is tuned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxsplit_encoder.products.fp8 import FP8, LARGEST, SMALLEST_SCALE
from fxsplit_encoder.products.layer import GELU_BELOW_ZERO

# Eight entries, 16 bytes of bfloat16, for each of the threads of four warps.
_BLOCK = 1024
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _gelu(x, IS_TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_TANH:
        # 0.5 x (1 + tanh(z)) is x sigmoid(2 z).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(  # type: ignore[no-untyped-def]
    product,
    row_scale,
    channel_scales,
    bias,
    first,
    FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of a row in float32; zeros beyond its end."""
    column = first + tl.arange(0, BLOCK)
    is_inside = column < FEATURES
    x = tl.load(product + column, mask=is_inside, other=0.0).to(tl.float32) * row_scale
    x *= tl.load(channel_scales + column, mask=is_inside, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + column, mask=is_inside, other=0.0).to(tl.float32)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_row(  # type: ignore[no-untyped-def]
    product,
    row_scales,
    channel_scales,
    bias,
    quantized,
    scales,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    GELU_BELOW_ZERO: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    product += row * FEATURES
    quantized += row * FEATURES
    row_scale = tl.load(row_scales + row)
    above, below = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, FEATURES, BLOCK):
        x = _scaled(product, row_scale, channel_scales, bias, first, FEATURES, HAS_BIAS, BLOCK)
        above, below = tl.maximum(above, x), tl.minimum(below, x)
    most_below = tl.minimum(-0.5 * tl.min(below, axis=0), GELU_BELOW_ZERO)
    largest = tl.maximum(_gelu(tl.max(above, axis=0), IS_TANH), most_below)
    scale = tl.maximum(largest / LARGEST, SMALLEST_SCALE)
    tl.store(scales + row, scale)
    inverse = 1.0 / scale
    for first in range(0, FEATURES, BLOCK):
        x = _scaled(product, row_scale, channel_scales, bias, first, FEATURES, HAS_BIAS, BLOCK)
        column = first + tl.arange(0, BLOCK)
        value = _gelu(x, IS_TANH) * inverse
        tl.store(quantized + column, value.to(quantized.dtype.element_ty), mask=column < FEATURES)


def gelu_rows(
    product: Tensor, row_scales: Tensor, channel_scales: Tensor, bias: Tensor | None, *, is_tanh: bool
) -> tuple[Tensor, Tensor]:
    """What `fxsplit::gelu_rows_fp8` computes, see `products.gelu_fp8`; all tensors contiguous."""
    quantized = torch.empty(product.shape, dtype=FP8, device=product.device)
    scales = torch.empty(product.shape[0], 1, dtype=torch.float32, device=product.device)
    gelu_rows_into(quantized, scales, product, row_scales, channel_scales, bias, is_tanh=is_tanh)
    return quantized, scales


def gelu_rows_into(
    quantized: Tensor,
    scales: Tensor,
    product: Tensor,
    row_scales: Tensor,
    channel_scales: Tensor,
    bias: Tensor | None,
    *,
    is_tanh: bool,
) -> None:
    """The same into tensors that are there; `quantized` of another dtype is rounded to that."""
    count, features = product.shape
    if count:
        _gelu_row[(count,)](
            *(product, row_scales, channel_scales, product if bias is None else bias, quantized, scales),
            *(LARGEST, SMALLEST_SCALE, GELU_BELOW_ZERO, features, bias is not None, is_tanh, _BLOCK),
            num_warps=_WARPS,
        )
