from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from fxsplit_encoder.compile.passes.gelu_epilogue import gelu_epilogue
from fxsplit_encoder.compile.passes.measured_products import measured_products
from fxsplit_encoder.compile.rewriting import call_function, mark_parameters
from fxsplit_encoder.products import linear

from .aten_graphs import Mlp, aten_graph

aten = torch.ops.aten


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Residual(nn.Module):
    """A block's second half."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.mlp = Mlp(tanh_gelu, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def test_the_gelu_joins_its_layer_and_the_residual_stays() -> None:
    module, x = Residual(), torch.randn(7, 12)
    graph = aten_graph(module, x)
    gelu_epilogue(graph.module)
    assert measured_products(graph.module) == 2
    up, down = graph.module.graph.find_nodes(op="call_function", target=linear)
    assert (up.args[3], down.args[3]) == ("gelu_tanh", "none")
    left = [graph.count(each) for each in (aten.addmm.default, aten.gelu.default, aten.add.Tensor)]
    assert left == [0, 0, 1]
    torch.testing.assert_close(graph.run(), module(x))


def test_without_a_bias_the_gelu_stays() -> None:
    module, x = Residual(bias=False), torch.randn(7, 12)
    graph = aten_graph(module, x)
    gelu_epilogue(graph.module)
    assert measured_products(graph.module) == 2
    assert graph.count(aten.gelu.default) == 1 and graph.count(aten.mm.default) == 0
    torch.testing.assert_close(graph.run(), module(x))


def test_images_are_rows_too() -> None:
    module, x = Residual(), torch.randn(3, 5, 12)
    graph = aten_graph(module, x)
    assert measured_products(graph.module) == 2
    torch.testing.assert_close(graph.run(), module(x))


@pytest.mark.parametrize(("dtype", "layers"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_on_cuda_only_layers_that_have_a_choice_change(dtype: torch.dtype, layers: int) -> None:
    """Inductor adds the bias of others in the kernel after them. No device is needed to trace."""
    graph, mode = fx.Graph(), FakeTensorMode()
    rows, weight, bias = (graph.placeholder(name) for name in ("rows", "weight", "bias"))
    for node, shape in ((rows, (7, 12)), (weight, (8, 12)), (bias, (8,))):
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
    mark_parameters(graph, [1, 2])
    matrix = call_function(graph, aten.t.default, weight)
    graph.output((call_function(graph, aten.addmm.default, bias, rows, matrix),))
    module = fx.GraphModule(nn.Module(), graph)
    assert measured_products(module) == layers
    assert len(module.graph.find_nodes(op="call_function", target=linear)) == layers
