"""ATen graphs of small functions, as passes see them: weights are inputs that are marked as parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxsplit_encoder.compile.passes import run_passes
from fxsplit_encoder.compile.rewriting import derivation, mark_parameters


@dataclass
class Graph:
    """A traced function and what it was called with."""

    module: fx.GraphModule
    args: list[Any]

    def count(self, target: Any) -> int:
        return len(self.module.graph.find_nodes(op="call_function", target=target))

    def apply(self, run: Callable[[fx.GraphModule], int]) -> int:
        return run_passes(self.module, {"it": run})["it"]

    @property
    def derived(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if derivation(node) is not None]

    def run(self) -> Any:
        """The graph's first result; the traced value of every node is compared with what it really makes."""
        self.module.graph.lint()
        self.module.recompile()
        values: dict[fx.Node, Any] = {}
        given = iter(self.args)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                found = derivation(node)
                values[node] = next(given) if found is None else found[0](*(values[n] for n in found[1]))
        inputs = [values[node] for node in self.module.graph.nodes if node.op == "placeholder"]
        with torch.no_grad():
            return _Compared(self.module).run(*inputs)[0]


class _Compared(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            traced = n.meta["val"]
            assert [_number(size) for size in traced.shape] == list(result.shape), n.format_node()
            assert [_number(stride) for stride in traced.stride()] == list(result.stride()), n.format_node()
            assert traced.dtype == result.dtype, n.format_node()
        return result


def _number(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def aten_graph(forward: Callable[..., Tensor], *examples: Tensor) -> Graph:
    """The inference graph of a function or module, for any number of rows in every example."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    module = forward if isinstance(forward, nn.Module) else nn.Module()
    parameters = dict(module.named_parameters())

    def call(*args: Tensor) -> tuple[Tensor]:
        if module is not forward:
            return (forward(*args),)
        given = dict(zip(parameters, args, strict=False))
        return (torch.func.functional_call(module, given, args[len(given) :]),)

    fakes = [fake_mode.from_tensor(parameter, static_shapes=True) for parameter in parameters.values()]
    for number, example in enumerate(examples):
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (example.dim() - 1)]
        context = StatelessSymbolicContext(sizes)  # type: ignore[arg-type]
        source = ConstantSource(f"input_{number}")
        fakes.append(fake_mode.from_tensor(example, source=source, symbolic_context=context))
    with torch.no_grad(), fake_mode:
        graph_module = make_fx(call, tracing_mode="real")(*fakes)
    mark_parameters(graph_module.graph, range(len(parameters)))
    return Graph(graph_module, [*parameters.values(), *examples])


def rewritten(
    run: Callable[[fx.GraphModule], int],
    forward: Callable[..., Tensor],
    *inputs: Tensor,
    times: int = 1,
    **closeness: Any,
) -> Graph:
    """The graph after a pass that changes it at so many places, and computes what eager does.

    Args:
        times: 0 for a graph that stays as it is.
    """
    graph = aten_graph(forward, *inputs)
    before = str(graph.module.graph)
    assert graph.apply(run) == times
    assert times or str(graph.module.graph) == before
    with torch.no_grad():
        torch.testing.assert_close(graph.run(), forward(*inputs), **closeness)
    return graph


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def rotated(x: Tensor) -> Tensor:
    """Something that is computed by features, as rotary embeddings are."""
    first, second = x.chunk(2, dim=-1)
    return x * 0.5 + torch.cat([-second, first], -1) * 0.7


class WithParameters(nn.Module):
    """A function of inputs and then of parameters."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList(parameters)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.own)


class Mlp(nn.Module):
    """Two linear layers with an activation between them, of (rows, width) or (images, tokens, width)."""

    def __init__(
        self,
        activation: Callable[[Tensor], Tensor],
        width: int = 12,
        hidden: int = 120,
        *,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.up(x))
        return self.down(hidden if self.gate is None else hidden * self.gate(x))
