"""Helpers of graph rewrites: nodes with traced values, marks of parameters and cuts, `permute_rows`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import detect_fake_mode, fake_mode_of, unset_fake_temporarily
from fxsplit_encoder._torch.dispatch import OpOverload, check, define_op, has_tag, schema_of
from fxsplit_encoder.compile.options import host_op
from fxsplit_encoder.compile.sizes import layout

aten = torch.ops.aten

_PARAMETER = "is_parameter"
_CUTS = "splitting_targets"
BESIDE = "runs_beside"
"""Marks nodes between two cuts, which no other node there reads, as a piece for a side stream."""
_HOST_CONSTANT = "_host_constant_"
_VARYING = torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape


def mark_parameters(graph: fx.Graph, positions: Iterable[int]) -> None:
    """Marks the graph's inputs at these positions as parameters or buffers."""
    inputs = graph.find_nodes(op="placeholder")
    for position in positions:
        inputs[position].meta[_PARAMETER] = True


def is_parameter(argument: Any) -> bool:
    """Whether an argument is a parameter, or derived from parameters alone."""
    return isinstance(argument, fx.Node) and bool(argument.meta.get(_PARAMETER))


def mark_cuts(module: fx.GraphModule, targets: frozenset[Any]) -> None:
    """Stores the operators at which a graph will be split."""
    module.meta[_CUTS] = targets


def cuts_after_host_ops(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the nodes after the last host op at which the graph will be split, in order."""
    targets = module.meta.get(_CUTS, frozenset())
    cuts: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op == "call_function" and host_op(node.target) is not None:
            cuts.clear()
        elif node.target in targets:
            cuts.append(node)
    return cuts


def call_function(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Adds a call with its traced value."""
    node = graph.call_function(target, args, kwargs)
    retrace(node)
    return node


def replace_by_call(node: fx.Node, target: Any, *args: Any) -> None:
    """Puts a call in the place of a node."""
    with node.graph.inserting_before(node):
        call = call_function(node.graph, target, *args)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def at_every_node(rewrite: Callable[[fx.Node], int]) -> Callable[[fx.GraphModule], int]:
    """Makes a pass of a function of one node, which returns at how many places it changed the graph."""

    @functools.wraps(rewrite)
    def run(module: fx.GraphModule) -> int:
        return sum(map(rewrite, list(module.graph.nodes)))

    return run


def node_value(node: fx.Node) -> Any:
    """Returns a node's traced value; redoes the arithmetic of torch's assertions, which carries none."""
    if "val" not in node.meta and node.op == "call_function" and not isinstance(node.target, OpOverload):
        args = fx.node.map_arg(node.args, node_value)
        if not any(a is None for a in args):
            node.meta["val"] = node.target(*args)  # type: ignore[operator]
    return node.meta.get("val")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Returns all arguments of a call by name, defaults included."""
    declared = schema_of(node.target).arguments
    defaults = {argument.name: argument.default_value for argument in declared}
    names = (argument.name for argument in declared)
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def retrace(node: fx.Node) -> None:
    """Redoes the traced value of a call."""
    node.meta["val"] = traced_value(node, {})


def traced_value(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Returns a call's result for traced values: those of `known`, else the nodes' own."""
    given = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n] if n in known else n.meta["val"])
    args, kwargs = given
    fake_mode: Any = detect_fake_mode(given)
    assert callable(node.target)
    with fake_mode, torch.no_grad():
        return node.target(*args, **kwargs)


def derived_parameter(graph: fx.Graph, make: Callable[..., Tensor], *sources: fx.Node) -> fx.Node:
    """Adds an input of the graph that the program computes from parameters, see `compile.derived`: by `make`,
    a function importable by name (or a `functools.partial` of one), of the tensors of `sources`, nodes for
    which `is_parameter` holds.
    """
    assert all(is_parameter(source) for source in sources)
    inputs = graph.find_nodes(op="placeholder")
    before = [n for n in inputs if derivation(n) is not None]
    with graph.inserting_after(inputs[-1]):
        node = graph.placeholder(f"derived_{len(before)}")
    node.meta["derived"] = (make, sources)
    values = [source.meta["val"] for source in sources]
    recipe = _recipe(node)
    # Blocks are equal, and making one takes some thirty operations on traced values.
    like = next((n.meta["val"] for n in reversed(before) if _recipe(n) == recipe), None)
    with fake_mode_of(values), torch.no_grad():
        if like is None:
            node.meta["val"] = make(*values)
        else:
            placed = {"dtype": like.dtype, "device": like.device}
            node.meta["val"] = torch.empty_strided(like.shape, like.stride(), **placed)
    node.meta[_PARAMETER] = True
    return node


def _recipe(node: fx.Node) -> tuple[Any, ...]:
    """Returns a comparable form of `derivation`: partial functions of the same arguments are not equal."""
    make, sources = node.meta["derived"]
    call = (make.func, make.args, make.keywords) if isinstance(make, functools.partial) else (make,)
    return call, [layout(source.meta["val"]) for source in sources]


def derivation(node: fx.Node) -> tuple[Callable[..., Tensor], tuple[fx.Node, ...]] | None:
    """Returns how an input of the graph is derived (`make`, sources); None: it is given."""
    found: tuple[Callable[..., Tensor], tuple[fx.Node, ...]] | None = node.meta.get("derived")
    return found


def fold_host_constants(module: fx.GraphModule) -> None:
    """Replaces copies to a device of what the CPU computes from constants alone by constants there.

    Ranges of positions and tensors of numbers in a model's code are computed on the CPU at each of its calls,
    and a copy from there cannot be captured. Not where sizes are symbolic, or numbers random.
    """
    on_host: set[fx.Node] = set()
    copies: list[fx.Node] = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        is_tensor = isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)
        if is_tensor and _is_constant(node, on_host):
            if value.device.type == "cpu":
                on_host.add(node)
            elif node.all_input_nodes:
                copies.append(node)
    values: dict[fx.Node, Tensor] = {}

    def compute(node: fx.Node) -> Tensor:
        if node not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), compute)
            target = node.target
            values[node] = target(*args, **kwargs) if callable(target) else getattr(module, target)
        return values[node]

    for node in copies:
        name = f"{_HOST_CONSTANT}{len(module._buffers)}"
        with unset_fake_temporarily(), torch.no_grad():
            module.register_buffer(name, compute(node))
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        constant.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(constant)
    for node in reversed(module.graph.nodes):
        if not node.users and (node in on_host or node in values):
            module.graph.erase_node(node)


def _is_constant(node: fx.Node, constants: set[fx.Node]) -> bool:
    """Whether a node is a constant of the graph, or computed of constants in the same way at every call."""
    if not isinstance(node.target, OpOverload) or not constants.issuperset(node.all_input_nodes):
        return node.op == "get_attr"
    return not any(has_tag(node.target, tag) for tag in _VARYING)


def _check_lengths(rows: Tensor, permutation: Tensor) -> None:
    check(
        rows.shape[0] == permutation.shape[0],
        lambda: f"permute_rows: {rows.shape[0]} rows and a permutation of {permutation.shape[0]}",
    )


def _permute(rows: Tensor, permutation: Tensor) -> Tensor:
    """(rows, ...) permuted by (rows,) int64."""
    _check_lengths(rows, permutation)
    return rows.index_select(0, permutation)


def _fake(rows: Tensor, permutation: Tensor) -> Tensor:
    _check_lengths(rows, permutation)  # which tells a trace that both count tokens
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.zeros_like(grad).index_add(0, ctx.saved_tensors[0], grad), None


permute_rows = define_op(
    "permute_rows(Tensor rows, Tensor permutation) -> Tensor",
    {"CompositeExplicitAutograd": _permute},
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)
