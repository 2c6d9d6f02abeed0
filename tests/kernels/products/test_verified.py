"""Products are the library's where it was seen to give equal bits, and ours elsewhere. Stand-ins on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.kernels.products import fixed
from fxsplit_encoder.kernels.products.fixed import Layer, VerifiedProducts, same_bits

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
