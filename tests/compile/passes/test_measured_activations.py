from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.activations import measured_activations
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_mlp_width
from fxsplit_encoder.kernels.products.measured import linear

from .aten_graphs import Graph, Mlp, Using, aten_graph, rewritten, tanh_gelu

aten = torch.ops.aten


def activations(graph: Graph) -> list[Any]:
    return [node.args[3] for node in graph.module.graph.find_nodes(op="call_function", target=linear)]


@pytest.mark.parametrize(("function", "name"), [(F.gelu, "gelu"), (tanh_gelu, "gelu_tanh")])
@pytest.mark.parametrize("shape", [(7, 12), (3, 5, 12)], ids=str)
def test_a_gelu_joins_its_layer(
    shape: tuple[int, ...], function: Callable[[Tensor], Tensor], name: str
) -> None:
    module, x = Mlp(function), torch.randn(shape)
    graph = aten_graph(module, x)
    assert graph.apply(measured_activations) == 1
    assert activations(graph) == [name]
    assert graph.count(aten.gelu.default) == 0 and graph.count(aten.addmm.default) == 1
    torch.testing.assert_close(graph.run(), module(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("shape", [(7, 12), (3, 5, 12)], ids=str)
def test_gates_and_what_they_gate_become_one_layer(
    shape: tuple[int, ...], is_padded: bool, bias: bool
) -> None:
    module, x = Mlp(F.silu, gated=True, bias=bias), torch.randn(shape)
    graph = aten_graph(module, x)
    assert graph.apply(pad_mlp_width) if is_padded else True
    assert graph.apply(measured_activations) == 1
    assert activations(graph) == ["swiglu"]
    assert [graph.count(each) for each in (aten.silu.default, aten.mul.Tensor)] == [0, 0]
    # Each pair of parameters as one, and that of the second layer where it is padded: no other copy is kept.
    assert sum(bool(node.users) for node in graph.derived) == 1 + bias + is_padded
    torch.testing.assert_close(graph.run(), module(x))


def gates_that_are_a_result_too(mlp: Any, x: Tensor) -> Tensor:
    gate = mlp.up(x)
    return mlp.down(F.silu(gate) * mlp.gate(x)) + gate.sum(-1, keepdim=True)


GATED = Mlp(F.silu, gated=True)
OTHERS = {
    "shared": Using(GATED, gates_that_are_a_result_too),
    "other rows": Using(GATED, lambda mlp, x: mlp.down(F.silu(mlp.up(x)) * mlp.gate(x + 1))),
    "one vector": Using(GATED, lambda mlp, x: F.silu(mlp.up(x)) * mlp.up.bias),
    "a gelu without a bias": Mlp(tanh_gelu, bias=False),
}


@pytest.mark.parametrize("module", OTHERS.values(), ids=OTHERS)
def test_others_stay(module: nn.Module) -> None:
    rewritten(measured_activations, module, torch.randn(7, 12), times=0)
