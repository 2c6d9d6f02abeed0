"""Products of rows with parameters and attention over batches become operations of one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.compile.passes.activations import gelu_epilogue
from fxsplit_encoder.compile.passes.own_kernels import fixed_products
from fxsplit_encoder.kernels.attention import dense_attention
from fxsplit_encoder.kernels.products.fixed import fixed_linear

from .aten_graphs import WithParameters, aten_graph, rewritten, tanh_gelu

aten = torch.ops.aten


def attend(x: Tensor) -> Tensor:
    q, k, v = x.view(-1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v)


X, WEIGHT, BIAS = torch.randn(7, 16), torch.randn(24, 16), torch.randn(24)


@pytest.mark.parametrize(
    ("forward", "parameters"),
    [
        (lambda x, w, b: F.linear(x, w, b), (WEIGHT, BIAS)),
        (lambda x, w: F.linear(x, w), (WEIGHT,)),
        (lambda x, w: x @ w, (WEIGHT.t().contiguous(),)),
        (lambda x, w, b: F.linear(x.view(-1, 1, 16), w, b), (WEIGHT, BIAS)),
    ],
    ids=["with a bias", "without", "of a matrix as it is", "of three dimensions"],
)
def test_linear_layers_are_replaced(forward: Callable[..., Any], parameters: tuple[Tensor, ...]) -> None:
    graph = rewritten(fixed_products, WithParameters(forward, *parameters), X)
    assert graph.count(fixed_linear) == 1
    assert graph.count(aten.mm.default) + graph.count(aten.addmm.default) == 0


def test_a_gelu_that_is_part_of_its_layer_stays_one() -> None:
    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return tanh_gelu(F.linear(x, w, b))

    graph = aten_graph(WithParameters(forward, WEIGHT, BIAS), X)
    assert gelu_epilogue(graph.module) == 1
    assert fixed_products(graph.module) == 1
    (node,) = graph.module.graph.find_nodes(op="call_function", target=fixed_linear)
    assert node.args[3] == "gelu_tanh"
    torch.testing.assert_close(graph.run(), forward(X, WEIGHT, BIAS))


def test_attention_over_a_batch_is_replaced_in_any_dtype() -> None:
    graph = rewritten(fixed_products, attend, torch.randn(5, 6 * 3 * 2 * 8))
    assert graph.count(dense_attention) == 1


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, w: x @ x.t(),
        lambda x, w: torch.addmm(x[:, :1], x, w.t()),
        lambda x, w: torch.addmm(w[:, 0], x, w.t(), beta=2),
        lambda x, w: torch.bmm(x.view(-1, 1, 16), x.view(-1, 16, 1)),
    ],
    ids=["rows with rows", "rows added", "a scaled bias", "batches"],
)
def test_other_products_stay(forward: Callable[..., Any]) -> None:
    rewritten(fixed_products, WithParameters(forward, WEIGHT), X, times=0)
