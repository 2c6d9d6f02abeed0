from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from fxsplit_encoder.compile.passes.measured_products import measured_products
from fxsplit_encoder.compile.rewriting import call_function, mark_parameters
from fxsplit_encoder.products import linear

from .aten_graphs import Mlp, aten_graph

aten = torch.ops.aten


def test_layers_become_measured_ones_and_what_follows_them_stays() -> None:
    module, x = Mlp(F.gelu), torch.randn(7, 12)
    graph = aten_graph(module, x)
    assert measured_products(graph.module) == 2
    left = [graph.count(each) for each in (linear, aten.addmm.default, aten.gelu.default)]
    assert left == [2, 0, 1]
    torch.testing.assert_close(graph.run(), module(x))


def test_images_are_rows_too() -> None:
    module, x = Mlp(F.gelu), torch.randn(3, 5, 12)
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
