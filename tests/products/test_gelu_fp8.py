"""Rows in fp8: what is kept of them, alone and after a GELU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.products.fp8 import FP8, LARGEST, quantize_rows
from fxsplit_encoder.products.gelu_fp8 import gelu_rows_fp8

floats = st.floats(-1e4, 1e4, width=32)


@settings(max_examples=60)
@given(st.lists(st.lists(floats, min_size=8, max_size=8), min_size=1, max_size=4))
def test_a_row_keeps_four_significant_bits_of_what_is_not_small(rows: list[list[float]]) -> None:
    matrix = torch.tensor(rows)
    quantized, scales = quantize_rows(matrix)
    assert (quantized.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (len(rows), 1))
    assert torch.isfinite(quantized.float()).all()
    error = (quantized.float() * scales - matrix).abs()
    # Half a unit of the last of four bits; below the smallest normal number, 2 ** -6, half of 2 ** -9.
    assert (error <= matrix.abs() * 2**-4 + scales * 2**-10 * 1.001).all()


def test_rows_of_other_rows_do_not_matter() -> None:
    matrix = torch.randn(6, 16)
    alone = quantize_rows(matrix[:3])
    beside = quantize_rows(torch.cat([matrix[:3], torch.full((2, 16), float("nan"))]))
    for a, b in zip(alone, beside, strict=True):
        assert torch.equal(a.float(), b[:3].float())


def operands(values: Tensor, *, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """A product and its scales and bias, so that a layer's results are `values`."""
    generator = torch.Generator().manual_seed(values.numel())
    rows, channels = values.shape
    row_scales = torch.rand(rows, 1, generator=generator) + 0.5
    channel_scales = torch.rand(1, channels, generator=generator) + 0.5
    bias = torch.randn(channels, generator=generator) if has_bias else None
    sums = values if bias is None else values - bias
    return sums / (row_scales * channel_scales), row_scales, channel_scales, bias


@settings(max_examples=100)
@given(
    st.lists(st.lists(floats, min_size=8, max_size=8), min_size=1, max_size=4),
    st.sampled_from([1.0, 1e-3]),
    st.booleans(),
    st.booleans(),
)
def test_a_gelu_is_kept_as_any_row_is(
    rows: list[list[float]], factor: float, has_bias: bool, is_tanh: bool
) -> None:
    product, *scales, bias = operands(torch.tensor(rows) * factor, has_bias=has_bias)
    values = product * scales[0] * scales[1] + (0 if bias is None else bias)
    exact = F.gelu(values.double(), approximate="tanh" if is_tanh else "none").float()
    quantized, own = gelu_rows_fp8(product, *scales, bias, is_tanh)
    assert (quantized.dtype, own.dtype, own.shape) == (FP8, torch.float32, (len(rows), 1))
    largest = exact.abs().amax(-1, keepdim=True)
    assert (own * LARGEST >= largest * (1 - 1e-5)).all()
    # It is larger only where no entry is above what one may be below zero.
    assert (
        own * LARGEST <= torch.where(exact.amax(-1, keepdim=True) == largest, largest, 0.171) + 0.171
    ).all()
    error = (quantized.float() * own - exact).abs()
    assert (error <= exact.abs() * 2**-4 + own * 2**-10 * 1.01 + 1e-6 * largest).all()


def test_a_scale_is_that_of_the_largest_entry_where_it_is_above_zero() -> None:
    values = torch.randn(64, 256)
    quantized, scales = gelu_rows_fp8(*operands(values, has_bias=True), True)
    expected, own = quantize_rows(F.gelu(values, approximate="tanh"))
    torch.testing.assert_close(scales, own)
    differ = quantized.float() != expected.float()
    assert differ.float().mean() < 0.01  # rounded once less


def test_garbage_in_a_row_stays_in_it() -> None:
    product, row_scales, channel_scales, bias = operands(torch.randn(6, 32), has_bias=True)
    expected = gelu_rows_fp8(product, row_scales, channel_scales, bias, False)
    product[4:], row_scales[5] = float("nan"), float("inf")
    for found, right in zip(
        gelu_rows_fp8(product, row_scales, channel_scales, bias, False), expected, strict=True
    ):
        assert torch.equal(found[:4].float(), right[:4].float())


# --- the Triton kernel, in Triton's interpreter

CHECK = """
import itertools, torch
from fxsplit_encoder.products.gelu_fp8 import gelu_rows_fp8
from fxsplit_encoder.products.gelu_fp8_triton import gelu_rows, gelu_rows_into

torch.manual_seed(0)
for dtype, features, has_bias, is_tanh in itertools.product(
    (torch.float32, torch.bfloat16), (48, 1024, 4352), (True, False), (True, False)
):
    product = (torch.randn(5, features) * torch.tensor([[1.0], [30.0], [1e-3], [0.0], [3.0]])).to(dtype)
    product[4] = -product[4].abs()  # nothing above zero
    row_scales, channel_scales = torch.rand(5, 1) + 0.1, torch.rand(1, features) + 0.1
    bias = torch.randn(features, dtype=dtype) * 0.1 if has_bias else None
    # Not fp8, which the interpreter rounds wrongly: 7.8 to 4.
    got, scales = torch.full(product.shape, float("nan")), torch.full((5, 1), float("nan"))
    gelu_rows_into(got, scales, product, row_scales, channel_scales, bias, is_tanh=is_tanh)
    got = got.to(torch.float8_e4m3fn)
    expected, right = gelu_rows_fp8(product, row_scales, channel_scales, bias, is_tanh)
    torch.testing.assert_close(scales, right)
    # Where the two compute the GELU differently in float32, it may be rounded to the next of fp8.
    difference = (got.float() - expected.float()).abs()
    assert (difference <= expected.float().abs() / 7.9 + 2**-9).all()
    assert (difference > 0).float().mean() < 0.01, (difference > 0).float().mean()
got, scales = gelu_rows(torch.zeros(0, 16), torch.zeros(0, 1), torch.ones(1, 16), None, is_tanh=True)
assert (got.shape, scales.shape) == ((0, 16), (0, 1))
"""


def test_our_own_kernel_computes_the_same() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK],
        env={"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path), "PATH": os.environ.get("PATH", "")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
