"""Which linear layers multiply in fp8: what each adds to the tower's error is measured on one batch.

The forward is traced once more, with uncompiled pieces, and its ATen graph is interpreted in float32: once as
it is, and once for each candidate from that layer on, with this layer alone quantized. Layers stay in the
tower's dtype, largest error first, until what the others add, quantized together, is within the limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.passes import PASSES, default_passes, relative_rms
from fxsplit_encoder.compile.passes.fp8_linear import candidates
from fxsplit_encoder.compile.passes.layers import Linear
from fxsplit_encoder.compile.rewriting import derivation
from fxsplit_encoder.compile.sizes import Size, shape_exprs
from fxsplit_encoder.compile.trace import trace_forward
from fxsplit_encoder.products.fp8 import quantize_rows

# It hides linear layers in another operation, and runs after fp8 has taken its own.
_AFTER_FP8 = "gelu_epilogue"

_SHORT = (torch.bfloat16, torch.float16)
_MANY_ROWS = 2**31 - 1

# Where the chosen layers together add too much, a part of so many is taken out before they are run again.
_PARTS_OF_TOO_MANY = 8


@dataclass(frozen=True, slots=True)
class LayerError:
    """A linear layer that fp8 may take."""

    name: str
    """Of its weight in the tower, of the first one where a pass has joined several; empty: it has none."""
    in_features: int
    out_features: int
    error: float
    """Relative root mean square that quantizing it alone adds to the tower's output."""
    is_kept: bool
    """Whether it stays in the tower's dtype."""


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """What fp8 does to a tower's results, relative root mean squares against float32."""

    layers: tuple[LayerError, ...]
    """In the graph's order."""
    own: float
    """Of the tower in its own dtype."""
    fp8: float
    """Of the tower with the chosen layers in fp8, the rest in its own dtype."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Positions of the layers that stay."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.is_kept)

    def __str__(self) -> str:
        kept = [layer.name or str(n) for n, layer in enumerate(self.layers) if layer.is_kept]
        names = f": {', '.join(kept)}" if kept else ""
        return (
            f"precision fp8: {len(kept)} of {len(self.layers)} layers stay in the tower's dtype{names}; "
            f"relative error {self.fp8:.2g}, without fp8 {self.own:.2g}"
        )


def measure_precision(
    forward: Callable[[dict[str, Tensor]], Tensor],
    inputs: Mapping[str, Tensor],
    dynamic_dims: Mapping[str, Sequence[int]],
    options: CompileOptions,
    module: nn.Module | None,
    names: Mapping[str, Tensor],
) -> PrecisionReport:
    """Measures the candidates of a forward on one batch, and chooses.

    Args:
        forward, inputs, dynamic_dims, options, module: as for `trace_forward`; inputs with contents.
        names: the tower's parameters by name.

    Raises:
        UntraceableError, CompileError: as for `trace_forward`.
    """
    graphs: list[fx.GraphModule] = []
    device = next(iter(inputs.values())).device
    passes = default_passes(device) if options.passes is None else options.passes
    traced = replace(
        options,
        piece_compiler="eager",
        passes=tuple(name for name in PASSES if name in passes and name != _AFTER_FP8),
        precision="auto",
        observe=graphs.append,
        progress=None,
    )
    bound = trace_forward(forward, inputs, dynamic_dims, traced, module)
    by_address = {tensor.data_ptr(): name for name, tensor in names.items()}
    with torch.no_grad():
        interpreter = Interpreter(graphs[-1], bound.arguments(inputs))
        limit = math.inf if options.fp8_max_error is None else options.fp8_max_error
        return choose(interpreter, limit, by_address)


def choose(interpreter: Interpreter, limit: float, by_address: Mapping[int, str]) -> PrecisionReport:
    """The report of a graph on its arguments, with the layers that together keep within `limit`.

    How many may be quantized is guessed from the errors of single layers, whose squares would add up if they
    were independent. As they need not be, what that many add is measured, and fewer are while it is too much.
    """
    found = candidates(interpreter.graph)
    exact, errors = interpreter.errors(found)
    own = relative_rms(interpreter.run(), exact)
    order = sorted(range(len(found)), key=lambda n: (errors[n], n))
    sums = itertools.accumulate(errors[number] ** 2 for number in order)
    count, fp8 = sum(math.sqrt(total) <= limit for total in sums), own
    while count:
        fp8 = relative_rms(interpreter.run([found[number] for number in sorted(order[:count])]), exact)
        if math.sqrt(max(0.0, fp8**2 - own**2)) <= limit:
            break
        count, fp8 = count - -(-count // _PARTS_OF_TOO_MANY), own
    quantized = set(order[:count])
    layers = tuple(
        LayerError(
            by_address.get(interpreter.address_of(layer.weight), ""),
            layer.in_features,
            layer.out_features,
            errors[number],
            number not in quantized,
        )
        for number, layer in enumerate(found)
    )
    return PrecisionReport(layers, own, fp8)


class Interpreter:
    """An ATen graph run node by node, in its own dtypes or in float32, with some layers quantized.

    Args:
        module: before fp8 has changed it.
        args: of its inputs that are not derived; the number of real rows is made here, so that all are real.
    """

    def __init__(self, module: fx.GraphModule, args: Sequence[Any]) -> None:
        self.graph = module.graph
        self._module = module
        self._nodes = list(module.graph.nodes)
        self._inputs = _inputs(module.graph.find_nodes(op="placeholder"), args)
        self._last: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            for read in node.all_input_nodes:
                self._last.setdefault(read, []).append(node)

    def address_of(self, node: fx.Node) -> int:
        """Of the parameter that an input is, or is derived from."""
        found = derivation(node)
        return int(self._inputs[node].data_ptr()) if found is None else self.address_of(found[1][0])

    def run(self, quantized: Collection[Linear] = ()) -> Tensor:
        """The first result, in the graph's dtypes."""
        return self._from(0, dict(self._inputs), {layer.node: layer for layer in quantized}, exact=False)

    def errors(self, layers: Sequence[Linear]) -> tuple[Tensor, list[float]]:
        """The first result in float32, and the error that each layer adds to it alone; infinity where the
        result is not finite.
        """
        values = {node: _lengthened(value) for node, value in self._inputs.items()}
        by_node = {layer.node: layer for layer in layers}
        outputs: list[Tensor] = []
        exact: Tensor | None = None
        for position, node in enumerate(self._nodes):
            if node in by_node:
                outputs.append(self._from(position, dict(values), {node: by_node[node]}, exact=True))
            if node.op == "output":
                exact = self._result(node, values)
            else:
                self._step(node, values, {}, exact=True)
        assert exact is not None
        errors = [relative_rms(output, exact) for output in outputs]
        return exact, [error if math.isfinite(error) else math.inf for error in errors]

    def _from(
        self, position: int, values: dict[fx.Node, Any], quantized: Mapping[fx.Node, Linear], *, exact: bool
    ) -> Tensor:
        for node in self._nodes[position:-1]:
            self._step(node, values, quantized, exact=exact)
        return self._result(self._nodes[-1], values)

    def _step(
        self, node: fx.Node, values: dict[fx.Node, Any], quantized: Mapping[fx.Node, Linear], *, exact: bool
    ) -> None:
        """Computes a node, and frees what it is the last to read."""
        if node.op == "get_attr":
            values[node] = getattr(self._module, str(node.target))
        elif node in quantized:
            values[node] = _quantized(quantized[node], values)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            if exact:
                args, kwargs = fx.node.map_aggregate((args, kwargs), _lengthened)
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
        for read in node.all_input_nodes:
            if self._last[read][-1] is node and read.op != "placeholder":
                values.pop(read, None)

    def _result(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor:
        result: Tensor = values[node.args[0][0]]  # type: ignore[index]
        return result


def _inputs(nodes: Sequence[fx.Node], args: Sequence[Any]) -> dict[fx.Node, Any]:
    """The values of a graph's inputs. Numbers that are missing are sizes of the tensors; the one tensor that
    is missing is the number of real rows.
    """
    values = dict(zip((node for node in nodes if derivation(node) is None), args, strict=False))
    symbols: dict[str, int] = {}
    for node, value in values.items():
        if isinstance(value, torch.Tensor):
            symbols |= zip(map(str, shape_exprs(node.meta["val"])), value.shape, strict=True)
    for node in nodes:
        found, traced = derivation(node), node.meta["val"]
        if found is not None:
            values[node] = found[0](*(values[source] for source in found[1]))
        elif isinstance(traced, torch.SymInt):
            values[node] = Size.of(traced)(symbols)
        elif node not in values:
            values[node] = torch.full((), _MANY_ROWS, dtype=traced.dtype, device=traced.device)
    return values


def _lengthened(value: Any) -> Any:
    """A tensor or dtype of 16 bits as one of 32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _SHORT else value
    return torch.float32 if value in _SHORT else value


def _quantized(layer: Linear, values: Mapping[fx.Node, Any]) -> Tensor:
    rows, weight = values[layer.rows], values[layer.weight]
    (a, a_scales), (b, b_scales) = quantize_rows(rows), quantize_rows(weight)
    product = (a.float() @ b.float().t()) * a_scales * b_scales.t()
    result = product if layer.bias is None else product + values[layer.bias].float()
    return result.to(rows.dtype)
