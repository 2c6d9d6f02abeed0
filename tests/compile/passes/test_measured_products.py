from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.gelu_epilogue import gelu_epilogue
from fxsplit_encoder.compile.passes.measured_products import measured_products
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


def test_the_gelu_and_the_residual_join_their_layers() -> None:
    module, x = Residual(), torch.randn(7, 12)
    graph = aten_graph(module, x)
    gelu_epilogue(graph.module)
    assert measured_products(graph.module) == 2
    up, down = graph.module.graph.find_nodes(op="call_function", target=linear)
    assert (up.args[4], up.args[3]) == ("gelu_tanh", None)
    assert down.args[4] == "none" and down.args[3] is not None
    assert [graph.count(each) for each in (aten.addmm.default, aten.gelu.default, aten.add.Tensor)] == [
        0,
        0,
        0,
    ]
    torch.testing.assert_close(graph.run(), module(x))


def test_without_a_bias_the_gelu_stays() -> None:
    module, x = Residual(bias=False), torch.randn(7, 12)
    graph = aten_graph(module, x)
    gelu_epilogue(graph.module)
    assert measured_products(graph.module) == 2
    assert graph.count(aten.gelu.default) == 1 and graph.count(aten.mm.default) == 0
    torch.testing.assert_close(graph.run(), module(x))


class ReadTwice(nn.Module):
    """What else reads the layer needs it without the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (x + y) * y


class OtherSums(nn.Module):
    """A scaled sum, one with itself, and one that broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.vector = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (layer(x) for layer in self.layers)
        return torch.add(x, a, alpha=2) * (b + b) * (c + self.vector)


def test_other_sums_stay() -> None:
    for module, sums in ((ReadTwice(), 1), (OtherSums(), 3)):
        x = torch.randn(7, 12)
        graph = aten_graph(module, x)
        assert measured_products(graph.module) == (1 if sums == 1 else 3)
        assert graph.count(aten.add.Tensor) == sums
        torch.testing.assert_close(graph.run(), module(x))


def test_images_keep_their_sum_apart() -> None:
    module, x = Residual(), torch.randn(3, 5, 12)
    graph = aten_graph(module, x)
    assert measured_products(graph.module) == 2
    assert graph.count(aten.add.Tensor) == 1
    torch.testing.assert_close(graph.run(), module(x))
