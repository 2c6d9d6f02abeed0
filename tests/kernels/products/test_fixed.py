"""`fxsplit::fixed_linear`: a row gets the same bits among any rows, at any place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.kernels.products import fixed
from fxsplit_encoder.kernels.products.fixed import (
    GELU_TANH,
    NOTHING,
    Layer,
    VerifiedProducts,
    activated,
    fixed_linear,
    same_bits,
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


# --- the library's products where they were seen to give equal bits, and ours elsewhere


CPU = torch.device("cpu")
WEIGHT = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
BIAS = torch.randn(40, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(300, 24, generator=torch.Generator().manual_seed(2))
FEW = (16, 32, 64, 128)


def one_by_one(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Its sums run in one order whatever the rows."""
    product = (rows[:, :, None] * matrix).cumsum(1)[:, -1]
    return product if bias is None else product + bias


class Library:
    """Adds in another order at some counts of rows, and notes at which it was asked."""

    def __init__(self, splits: Callable[[int], bool] = lambda count: False) -> None:
        self.splits = splits
        self.counts: list[int] = []

    def __call__(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        self.counts.append(rows.shape[0])
        if not self.splits(rows.shape[0]):
            return one_by_one(rows, matrix, bias, activation)
        parts = [one_by_one(rows[:, k], matrix[k], None, "") for k in (slice(0, 12), slice(12, 24))]
        return parts[0] + parts[1] + (0 if bias is None else bias)


def own(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return one_by_one(rows, matrix, bias, activation) + 1  # so that it is told from the library's


def run(products: VerifiedProducts, count: int) -> Tensor:
    return products(ROWS[:count].clone(), WEIGHT.t(), BIAS, "")


LAYER = Layer.of(ROWS, WEIGHT.t(), BIAS, "")


def test_a_library_that_splits_at_some_count_is_found_and_not_used() -> None:
    for splitting in (16, 64, 128):
        products = VerifiedProducts(Library(lambda count, s=splitting: count == s), own, FEW)  # type: ignore[misc]
        assert torch.equal(run(products, 40), own(ROWS[:40], WEIGHT.t(), BIAS, "")), splitting
        (line,) = products.describe(CPU)
        assert line.startswith("product 24 to 40 in float32 (bias): by our own kernel")
        assert products.choices(CPU) == ["24 to 40 in float32 (bias): False"]


def test_a_place_that_shows_is_found() -> None:
    def worse_at_the_end(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        result = one_by_one(rows, matrix, bias, activation)
        result[100:] += 1e-5
        return result

    assert not same_bits(worse_at_the_end, LAYER, [16, 64], reference_rows=128)
    assert same_bits(one_by_one, LAYER, [16, 64, 129], reference_rows=128)


def test_a_difference_that_few_rows_show_is_found() -> None:
    def worse_at_one_row(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        result = one_by_one(rows, matrix, bias, activation)
        if rows.shape[0] == 16:
            result[(rows == rare).all(1)] += 1e-5
        return result

    rare = LAYER.sample(fixed.DISTINCT)[0][700]
    assert not same_bits(worse_at_one_row, LAYER, [16], reference_rows=128)
    assert same_bits(worse_at_one_row, LAYER, [64], reference_rows=128)


def test_a_library_with_equal_bits_is_used_at_counts_that_were_tried_alone() -> None:
    library = Library()
    products = VerifiedProducts(library, own, FEW)
    expected = one_by_one(ROWS, WEIGHT.t(), BIAS, "")
    run(products, 16)
    for count, size in ((16, 16), (1, 16), (17, 24), (40, 48), (63, 64), (100, 128), (128, 128)):
        library.counts.clear()
        assert torch.equal(run(products, count), expected[:count])
        assert library.counts[-1] == size
    (line,) = products.describe(CPU)
    assert line == "products: 1 layers by cuBLAS, with equal bits at 6 counts of rows"  # and 24, 48


def test_a_count_with_other_bits_is_filled_up_or_cut() -> None:
    """It came after the layer was taken: what was handed out before stays right."""
    library = Library(lambda count: count in (96, 192, 256))
    products = VerifiedProducts(library, own, FEW)
    expected = one_by_one(ROWS, WEIGHT.t(), BIAS, "")
    for count, sizes in ((90, [128]), (200, [128, 128])):
        assert torch.equal(run(products, count), expected[:count])
        library.counts.clear()
        assert torch.equal(run(products, count), expected[:count])
        assert library.counts == sizes
    with measuring():
        assert torch.equal(run(products, 192), expected[:192])


def test_a_library_that_does_not_take_the_layer_is_not_used() -> None:
    def refuses(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        raise RuntimeError("requires the cuBLASLt backend")

    products = VerifiedProducts(refuses, own, FEW)
    assert torch.equal(run(products, 5), own(ROWS[:5], WEIGHT.t(), BIAS, ""))


def test_memory_that_runs_out_says_nothing_of_a_layer() -> None:
    library = Library()

    def hungry(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        if rows.shape[0] > 64:
            raise torch.OutOfMemoryError
        return library(rows, matrix, bias, activation)

    with pytest.raises(torch.OutOfMemoryError):
        run(VerifiedProducts(hungry, own, (16, 128)), 5)


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    products = VerifiedProducts(Library(), own, FEW)
    monkeypatch.setattr(fixed, "_is_capturing", lambda device: True)
    with pytest.raises(CaptureError, match="24 to 40 in float32"):
        run(products, 5)


def test_layers_differ_by_layout_and_epilogue_not_by_weights() -> None:
    library = Library()
    products = VerifiedProducts(library, own, FEW)
    weight = WEIGHT.clone()
    products(ROWS[:16].clone(), weight.t(), BIAS, "")
    tried = len(library.counts)
    products(ROWS[:16].clone(), weight.zero_().t(), BIAS, "")  # of the same kind: tried already
    assert len(library.counts) == tried + 1
    products(ROWS[:16].clone(), weight.t(), None, "")
    assert len(products.choices(CPU)) == 2
