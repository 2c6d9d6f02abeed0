"""`fxsplit::fixed_linear`: a row gets the same bits among any rows, at any place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.kernels.products import fixed
from fxsplit_encoder.kernels.products.fixed import (
    GELU_TANH,
    NOTHING,
    Layer,
    activated,
    fixed_linear,
)

from ..attention.fakes import run_with_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    return weight.to(dtype), torch.randn(out_features, generator=generator).to(dtype)


@settings(max_examples=40)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(64, 192), (33, 17), (1, 1), (300, 5)]),
    st.sampled_from([NOTHING, GELU_TANH]),
    st.booleans(),
    st.lists(st.integers(0, 199), min_size=1, max_size=150),
)
def test_rows_have_the_same_bits_wherever_they_are(
    dtype: torch.dtype, sizes: tuple[int, int], activation: str, has_bias: bool, chosen: list[int]
) -> None:
    weight, bias = layer(*sizes, dtype)
    rows = torch.randn(200, sizes[0], generator=torch.Generator().manual_seed(3)).to(dtype)
    rest = (weight.t(), bias if has_bias else None, activation)
    together = fixed_linear(rows, *rest)
    assert torch.equal(fixed_linear(rows[chosen], *rest), together[chosen])
    exact = rows.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    error = (together.double() - activated(exact, activation)).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_rows_may_lie_anyhow_and_be_none() -> None:
    weight, bias = layer(24, 40, torch.float32)
    rows = torch.randn(130, 24)
    expected = fixed_linear(rows, weight.t(), bias, NOTHING)
    strided = torch.randn(130, 30)[:, 3:27]
    strided.copy_(rows)
    assert torch.equal(fixed_linear(strided, weight.t(), bias, NOTHING), expected)
    assert torch.equal(fixed_linear(rows[7:], weight.t(), bias, NOTHING), expected[7:])
    assert fixed_linear(rows[:0], weight.t(), bias, NOTHING).shape == (0, 40)


def test_where_a_place_in_a_block_shows_rows_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    exact = fixed.cpu_product

    def worse_at_the_end(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        counts.append(rows.shape[0])
        product = exact(rows, matrix, bias, activation)
        product[48:] *= 1 + 2 * torch.finfo(rows.dtype).eps
        return product

    monkeypatch.setattr(fixed, "cpu_product", worse_at_the_end)
    monkeypatch.setattr(fixed, "block_rows", fixed.block_rows.__wrapped__)
    weight, bias = layer(24, 40, torch.float32)
    rows = torch.randn(70, 24)
    together = fixed_linear(rows, weight.t(), bias, NOTHING)
    assert counts[-70:] == [1] * 70
    assert torch.equal(fixed_linear(rows[50:], weight.t(), bias, NOTHING), together[50:])


def test_it_is_an_operator_as_torch_expects_it() -> None:
    weight, bias = layer(24, 40, torch.float32)
    for inputs in (
        (torch.randn(70, 24), weight.t(), bias, GELU_TANH),
        (torch.randn(1, 24), weight.t(), None, ""),
    ):
        torch.library.opcheck(fixed_linear, inputs, test_utils=("test_schema", "test_faketensor"))


def test_a_sample_has_the_layout_and_the_alignment_of_the_layer() -> None:
    values = torch.randn(40 * 24 + 4)
    matrix, bias = values[2 : 2 + 960].view(40, 24).t(), torch.randn(41)[1:]
    known = Layer.of(torch.randn(3, 24), matrix, bias, GELU_TANH)
    rows, other, added = known.sample(5)
    assert rows.shape == (5, 24)
    assert added is not None
    assert (other.shape, other.stride()) == (matrix.shape, matrix.stride())
    alignment = 64  # what torch gives on a CPU
    assert [t.data_ptr() % alignment for t in (other, added)] == [
        t.data_ptr() % alignment for t in (matrix, bias)
    ]
    again: Any = known.sample(5)
    assert all(map(torch.equal, again, (rows, other, added)))
    assert str(known) == "24 to 40 in float32 (bias, gelu_tanh)"


# --- the Triton kernel, in Triton's interpreter

CHECK = """
import itertools, torch
import torch.nn.functional as F
from fxsplit_encoder.kernels.products.triton_kernels import product

torch.manual_seed(0)
for dtype, (k, n), gelu, has_bias in itertools.product(
    (torch.float32, torch.float16), ((64, 192), (100, 70), (7, 3)), (False, True), (True, False)
):
    weight, rows = torch.randn(n, k).to(dtype), torch.randn(150, k).to(dtype)
    bias = torch.randn(n).to(dtype) if has_bias else None
    got = product(rows, weight.t(), bias, gelu=gelu)
    exact = rows.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    if gelu:
        exact = F.gelu(exact, approximate="tanh")
    torch.testing.assert_close(got.double(), exact, rtol=2e-3, atol=2e-2 if dtype == torch.float16 else 1e-4)
    for count in (1, 16, 65, 129):
        assert torch.equal(product(rows[:count].clone(), weight.t(), bias, gelu=gelu), got[:count])
    assert torch.equal(product(rows, weight.t().contiguous(), bias, gelu=gelu), got)
assert product(torch.zeros(0, 4), torch.zeros(4, 5), None, gelu=False).shape == (0, 5)
"""


def test_our_own_kernel_multiplies() -> None:
    pytest.importorskip("triton")
    run_with_triton(CHECK, TRITON_INTERPRET="1")
