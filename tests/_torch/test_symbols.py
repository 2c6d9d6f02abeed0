"""Sizes by the names that a trace settled on."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxsplit_encoder._torch.inductor import compile_graph
from fxsplit_encoder._torch.symbols import under_own_name


def test_inductor_finds_a_size_that_the_trace_found_equal_to_another() -> None:
    """As in a piece of vLLM's Qwen2.5-VL, which gets the number under its first name, and tensors whose sizes
    are terms of the other.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def rows_of(name: str) -> torch.SymInt:
        dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        traced = mode.from_tensor(torch.ones(6), symbolic_context=dynamic, source=ConstantSource(name))
        return traced.shape[0]  # type: ignore[return-value]

    first, second = rows_of("first"), rows_of("second")
    torch._check(first == second)
    replaced = second if second.node._expr != second.node.expr else first
    assert replaced.node._expr != replaced.node.expr, "the trace has two names for it"
    named = under_own_name(replaced)
    assert named.node._expr == named.node.expr == replaced.node.expr
    assert under_own_name(named) is named
    assert under_own_name(3) == 3

    # A number, and a tensor half as long.
    graph = fx.Graph()
    rows, half = graph.placeholder("rows"), graph.placeholder("half")
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    ones = graph.call_function(torch.ops.aten.full.default, ([rows, 4], 1.0), options)
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (half, 2.0))
    graph.output((ones, doubled))
    with mode:
        values = [replaced, torch.ones(replaced // 2, 4)]
        rows.meta["val"], half.meta["val"] = values
        ones.meta["val"], doubled.meta["val"] = torch.ones(replaced, 4), values[1] * 2.0
    compiled = compile_graph(fx.GraphModule(nn.Module(), graph), values)
    for count in (6, 9):
        made, twice = compiled([count, torch.ones(count // 2, 4)])
        assert made.shape == (count, 4)
        assert twice.tolist() == [[2.0] * 4] * (count // 2)
