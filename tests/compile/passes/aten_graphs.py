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
from fxsplit_encoder.kernels.attention import dense_attention


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

    def run(self, *others: Tensor) -> Any:
        """The graph's first result. Without other inputs the traced value of every node is compared with what
        it really makes.
        """
        self.module.graph.lint()
        self.module.recompile()
        values: dict[fx.Node, Any] = {}
        given = iter([*self.args[: len(self.args) - len(others)], *others])
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                found = derivation(node)
                values[node] = next(given) if found is None else found[0](*(values[n] for n in found[1]))
        inputs = [values[node] for node in self.module.graph.nodes if node.op == "placeholder"]
        with torch.no_grad():
            return (fx.Interpreter if others else _Compared)(self.module).run(*inputs)[0]


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
    """The graph after a pass that changes it at so many places, and computes what eager does; of a single
    input, also of more rows.

    Args:
        times: 0 for a graph that stays as it is.
    """
    graph = aten_graph(forward, *inputs)
    before = str(graph.module.graph)
    assert graph.apply(run) == times
    assert times or str(graph.module.graph) == before
    with torch.no_grad():
        torch.testing.assert_close(graph.run(), forward(*inputs), **closeness)
        if times and len(inputs) == 1:
            more = torch.cat([inputs[0], inputs[0][:2]])
            torch.testing.assert_close(graph.run(more), forward(more), **closeness)
    return graph


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def rotated(x: Tensor) -> Tensor:
    """Something that is computed by features, as rotary embeddings are."""
    first, second = x.chunk(2, dim=-1)
    return x * 0.5 + torch.cat([-second, first], -1) * 0.7


by_torch = F.scaled_dot_product_attention


def by_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense_attention(q, k, v, 0.3)


def same(x: Tensor) -> Tensor:
    return x


class Layers(nn.Module):
    """Queries, keys and values of two heads from layers of their own, and a layer of what attention makes."""

    def __init__(self, *, biases: str = "qkv", width: int = 32, head_dim: int = 8) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v = (nn.Linear(width, 2 * head_dim, bias=name in biases) for name in "qkv")
        self.out = nn.Linear(2 * head_dim, width)

    def parts(self, x: Tensor, of_queries: Callable[[Tensor], Tensor] = same) -> list[Tensor]:
        """Head by head; queries are computed with before they are cut."""
        made = (of_queries(self.q(x)), self.k(x), self.v(x))
        return [each.unflatten(-1, (-1, self.head_dim)) for each in made]


class Batched(Layers):
    """Attention over a batch of images."""

    def __init__(
        self, attend: Callable[..., Tensor], of_queries: Callable[[Tensor], Tensor] = same, **sizes: Any
    ) -> None:
        super().__init__(**sizes)
        self.attend, self.of_queries = attend, of_queries

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.parts(x, self.of_queries))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Using(nn.Module):
    """What a function makes of a module's layers and the inputs."""

    def __init__(self, module: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.module, *inputs)


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
