import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile import padding
from fxsplit_encoder.compile.passes.fp8_linear import (
    candidates,
    fp8_linear,
    product_fp8,
    relative_rms,
)
from fxsplit_encoder.compile.rewriting import call_function
from fxsplit_encoder.products.fp8 import FP8, quantize_rows
from fxsplit_encoder.products.gelu_fp8 import gelu_rows_fp8

from .aten_graphs import Mlp, aten_graph

QUANTIZE, T = torch.ops.fxsplit.quantize_rows.default, torch.ops.aten.t.default


class Tower(nn.Module):
    """Patch embedding, blocks of two layers, and a merger of four rows."""

    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Linear(48, width)
        self.blocks = nn.ModuleList(Mlp(F.gelu, width, hidden) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.merger = nn.Linear(4 * width, 96)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(self.norm(hidden))
        return self.merger(hidden.view(-1, 256))


def test_the_layers_of_the_blocks_are_quantized_and_no_others() -> None:
    tower, x = Tower(), torch.randn(16, 48)
    graph = aten_graph(tower, x)
    assert fp8_linear(graph.module, 64) == 6
    assert graph.count(product_fp8) == 6
    weights = [tuple(node.meta["val"].shape) for node in graph.derived if node.meta["val"].dtype == FP8]
    assert weights == [(128, 64), (64, 128)] * 3
    assert graph.count(torch.ops.aten.addmm.default) == 2
    error = relative_rms(graph.run(), tower(x))
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_between_two_layers_is_one_operation_with_both(approximate: str) -> None:
    tower, x = Tower(), torch.randn(16, 48)
    for block in tower.blocks:
        block.activation = functools.partial(F.gelu, approximate=approximate)
    graph = aten_graph(tower, x)
    assert fp8_linear(graph.module, 64) == 6
    graph.module.graph.eliminate_dead_code()
    assert (graph.count(gelu_rows_fp8), graph.count(QUANTIZE)) == (3, 3)
    assert graph.count(torch.ops.aten.gelu.default) == 0
    fused = graph.module.graph.find_nodes(op="call_function", target=gelu_rows_fp8)
    assert {node.args[4] for node in fused} == {approximate == "tanh"}
    assert relative_rms(graph.run(), tower(x)) < 0.05


@pytest.mark.parametrize(("least", "expected"), [(128, 0), (65, 0), (64, 6)])
def test_small_layers_stay(least: int, expected: int) -> None:
    graph = aten_graph(Tower(), torch.randn(16, 48))
    assert fp8_linear(graph.module, least) == expected


def test_widths_that_the_kernels_do_not_take_stay() -> None:
    graph = aten_graph(Tower(hidden=120), torch.randn(16, 48))
    assert fp8_linear(graph.module, 16) == 0


def test_a_graph_without_layers_stays() -> None:
    graph = aten_graph(lambda x: x * 2, torch.randn(4, 8))
    assert fp8_linear(graph.module, 1) == 0


class SharedRows(Tower):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        both = self.blocks[0].up(hidden) * self.blocks[1].up(hidden)
        return self.blocks[0].down(self.blocks[2].down(both).repeat(1, 2))


def test_rows_that_two_layers_read_are_quantized_once() -> None:
    tower, x = SharedRows(), torch.randn(16, 48)
    graph = aten_graph(tower, x)
    assert fp8_linear(graph.module, 64) == 3
    assert graph.count(QUANTIZE) == 2
    assert relative_rms(graph.run(), tower(x)) < 0.1


@pytest.mark.parametrize("by_rows", [True, False])
def test_the_proof_of_padding_knows_what_a_scale_is_of(by_rows: bool) -> None:
    graph = aten_graph(lambda x: x.t(), torch.randn(4, 8)).module.graph
    rows, transposed = next(iter(graph.nodes)), graph.find_nodes(op="call_function", target=T)[0]
    with graph.inserting_after(transposed):
        quantized = call_function(graph, QUANTIZE, rows if by_rows else transposed)
    tokens = str(rows.meta["val"].shape[0])
    report = padding.analyse([transposed, quantized], {rows: padding.Rows(0)}, tokens)
    assert report.proved == by_rows
    assert by_rows or "scales tokens together" in str(report)


def by_scaled_rows(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A layer as one product with a scale per row and column, which rounds once."""
    (a, a_scales), (b, b_scales) = quantize_rows(x), quantize_rows(weight)
    exact = (a.double() @ b.double().t()) * a_scales * b_scales.t()
    return (exact if bias is None else exact + bias.double()).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_is_the_product_of_scaled_rows(bias: bool, dtype: torch.dtype) -> None:
    blocks = nn.Sequential(*[nn.Linear(64, 64, bias=bias) for _ in range(3)]).to(dtype)
    x = torch.randn(9, 64).to(dtype)
    graph = aten_graph(blocks, x)
    assert fp8_linear(graph.module, 64) == 1
    first = blocks[0](x)
    middle = by_scaled_rows(first, blocks[1].weight, blocks[1].bias, dtype)
    assert relative_rms(graph.run(), blocks[2](middle)) < 4 * torch.finfo(dtype).eps


def test_bfloat16_holds_the_largest_sums_and_no_relative_error_is_added() -> None:
    # Rows and channels of every magnitude, all entries at the largest number of the format.
    x = torch.full((4, 4352), 1.0) * torch.tensor([1e-20, 1e-3, 1.0, 1e20])[:, None]
    (a, scales), (b, factors) = quantize_rows(x), quantize_rows(torch.full((16, 4352), -3.0))
    product = product_fp8(a, b, torch.ones(()), torch.bfloat16)
    assert torch.isfinite(product).all()
    result = product.double() * scales * factors.t()
    # Below the smallest scale a row counts as zeros.
    torch.testing.assert_close(result[1:], -3.0 * 4352 * x[1:, :16].double(), rtol=2**-8, atol=0)
    assert (result[0].abs() < 1e-11).all()


def test_garbage_in_a_row_stays_in_it() -> None:
    tower = Tower()
    graph = aten_graph(tower, torch.randn(16, 48))
    fp8_linear(graph.module, 64)
    clean = torch.randn(16, 48)
    dirty = clean.clone()
    dirty[12], dirty[13], dirty[14], dirty[15] = float("nan"), float("inf"), 1e30, 0.0
    results = []
    for x in (clean, dirty):
        graph.args[-1] = x
        results.append(graph.run())
    assert torch.equal(results[0][:3], results[1][:3])  # the merger joins four rows
    assert torch.isnan(results[1][3]).all()


def test_kept_layers_stay_and_the_others_are_quantized() -> None:
    graph = aten_graph(Tower(), torch.randn(16, 48))
    names = [layer.node.name for layer in candidates(graph.module.graph, 64)]
    assert fp8_linear(graph.module, 64, kept=(0, 5)) == 4
    left = {node.name for node in graph.module.graph.nodes}
    assert [name in left for name in names] == [True, False, False, False, False, True]


def test_the_unit_scale_is_derived_once() -> None:
    graph = aten_graph(Tower(), torch.randn(16, 48))
    fp8_linear(graph.module, 64)
    assert sum(node.meta["val"].dim() == 0 for node in graph.derived) == 1
    assert len(graph.derived) == 13


def test_the_operation_is_well_formed() -> None:
    a, b = quantize_rows(torch.randn(5, 32))[0], quantize_rows(torch.randn(16, 32))[0]
    for dtype in (torch.float32, torch.bfloat16):
        inputs: Any = (a, b, torch.ones(()), dtype)
        # The check of the schema compares inputs by operations that float8 lacks.
        torch.library.opcheck(product_fp8, inputs, test_utils="test_faketensor")


def test_the_relative_error() -> None:
    reference = torch.tensor([3.0, -4.0])
    assert relative_rms(reference * 1.1, reference) == pytest.approx(0.1, rel=1e-5)
    assert relative_rms(reference, reference) == 0.0


def test_equal_zeros_have_no_error() -> None:
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    assert relative_rms(zeros, zeros) == relative_rms(ones, ones) == 0
    assert relative_rms(ones, zeros) == float("inf")
