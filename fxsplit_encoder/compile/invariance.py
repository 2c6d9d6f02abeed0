"""`invariant: true`: checks that a graph gives a row the same bits whatever other rows are with it.

Every operation has to be pointwise by torch's tag, or move, look up or make values, or reduce dimensions of
fixed sizes, or be `fxsplit::fixed_linear` or attention by the kernel of `attention.chooser.invariant_kernel`.
Others may choose an algorithm by the number of rows, and are refused by name. `compile.padding` proves that
rows do not read one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.options import host_op
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.padding.rules import CONSTRUCTORS, COPIES, MOVERS
from fxsplit_encoder.compile.padding.states import is_pointwise, operation
from fxsplit_encoder.compile.passes.own_kernels import of_parameters
from fxsplit_encoder.compile.rewriting import arguments_of
from fxsplit_encoder.compile.sizes import shape_exprs
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.kernels.attention import KERNELS, AttentionShape, dense_attention, varlen_attention
from fxsplit_encoder.kernels.attention.chooser import invariant_kernel
from fxsplit_encoder.kernels.products.fixed import fixed_linear

_FIXED = (fixed_linear, varlen_attention, dense_attention)

_PLAIN = frozenset(
    (
        *(CONSTRUCTORS | COPIES | MOVERS),
        *("alias", "contiguous", "detach", "to", "lift_fresh_copy", "zeros_like", "ones_like", "empty_like"),
        *("full_like", "view_as_real", "view_as_complex", "tril", "triu", "constant_pad_nd", "unfold"),
        *("embedding", "index", "_unsafe_index", "index_select", "gather", "take", "fxsplit::permute_rows"),
        *("floor_divide", "pixel_shuffle", "pixel_unshuffle"),
    )
)

_OVER_TRAILING = ("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
_OVER_SIZES = frozenset(
    (
        *_OVER_TRAILING,
        *("sum", "mean", "amax", "amin", "argmax", "argmin", "prod", "any", "all", "var", "std", "var_mean"),
        *("_softmax", "_log_softmax", "softmax", "linalg_vector_norm", "flip", "roll"),
    )
)

_MOST_PROBLEMS = 10


def check_rows(module: fx.GraphModule, device: torch.device, compiler: str | Callable[..., Any]) -> None:
    """Checks every node of a graph after the passes. ConfigError: `invariant` cannot be kept for this graph;
    names the nodes, or what to change.
    """
    problems = [*_of_device(device, compiler), *_of_heads(module.graph, device)]
    problems += [f"invariant: {node.name}: {why}" for node, why in row_dependence(module.graph)]
    if problems:
        raise ConfigError(*problems[:_MOST_PROBLEMS])


def _of_device(device: torch.device, compiler: str | Callable[..., Any]) -> Iterator[str]:
    why = ""
    if device.type == "cuda" and compiler in ("eager", "aot_eager"):
        why, allowed = "on CUDA torch's own reductions add in an order by the number of rows", "inductor"
    elif device.type == "cpu" and compiler == "inductor":
        why, allowed = "on a CPU its loops end by other code than they begin", "eager, aot_eager"
    if why:
        yield f"piece_compiler: contradicts invariant: {why}; allowed: auto, {allowed}; got {compiler!r}"
    if device.type == "cpu" and (threads := torch.get_num_threads()) > 1:
        yield (
            "invariant: on a CPU threads share tensors by their number of entries, and each ends its part by "
            f"other code; allowed: one, by torch.set_num_threads(1); got {threads}"
        )


def _of_heads(graph: fx.Graph, device: torch.device) -> Iterator[str]:
    for node in graph.nodes:
        if node.target in (varlen_attention, dense_attention):
            value = node.meta["val"]
            heads, head_dim = int(value.shape[1]), int(value.shape[-1])
            shape = AttentionShape(device, value.dtype, heads, head_dim, tokens=1, longest=1, segments=1)
            try:
                invariant_kernel(KERNELS, shape)
            except ConfigError as error:
                yield f"{error}; at {node.name}"
                return


def check_proof(report: PaddingReport, token_symbol: str | None) -> None:
    """Raises ConfigError where rows may read one another, or a graph is of one shape."""
    if token_symbol is None:
        raise ConfigError(
            "invariant: the graph was traced for one shape, and gives other shapes to other graphs; expected "
            "a size that counts tokens"
        )
    if not report.proved:
        node, reason = report.reasons[0]
        raise ConfigError(f"invariant: {node}: rows may depend on other rows: {reason}")


def row_dependence(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Yields nodes whose bits may depend on the number of rows, and why."""
    for node in graph.nodes:
        value = node.meta.get("val")
        first = value[0] if isinstance(value, list | tuple) and value else value
        if node.op != "call_function" or not isinstance(first, torch.Tensor):
            continue  # a size
        if node.target in _FIXED or host_op(node.target) or all(map(of_parameters, node.all_input_nodes)):
            continue
        why = _why(node)
        if why is not None:
            yield node, why


def _why(node: fx.Node) -> str | None:
    name = operation(node)
    if name in _PLAIN or is_pointwise(node):
        return None
    if name in _OVER_SIZES:
        return None if _has_fixed_sizes(node, name) else f"{name} runs over as many entries as there are rows"
    return f"{name} may choose an algorithm by the number of rows"


def _has_fixed_sizes(node: fx.Node, name: str) -> bool:
    source: Any = node.args[0]
    if name in _OVER_TRAILING:
        shape: Any = node.args[1]
        return all(isinstance(size, int) for size in shape)
    sizes = shape_exprs(source.meta["val"])
    dims: Any = arguments_of(node).get("dims" if name in ("flip", "roll") else "dim")
    if dims is None or dims == []:
        dims = range(len(sizes))
    return all(sizes[dim].is_Integer for dim in (dims if isinstance(dims, list | range) else [dims]))
