"""Compiles pieces, the subgraphs between splitting ops, once for each structure.

A piece's weights are inputs and its token count is a symbol, so blocks, budgets and exact shapes share a
compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import sympy
import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import fake_mode_of, make_fx
from fxsplit_encoder.compile.layouts import choice_of_layouts
from fxsplit_encoder.compile.padding.states import is_pointwise, operation
from fxsplit_encoder.compile.sizes import layout


@dataclass(frozen=True, slots=True)
class Piece:
    """Nodes between two splitting ops, with inputs and outputs."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    """Nodes outside the piece that it reads, tensors and scalars, in order of first use."""
    outputs: tuple[fx.Node, ...]
    beside: bool = False
    """Whether it may run on a side stream, see `Step`."""


def signature(piece: Piece) -> tuple[Any, ...]:
    """Returns a key that two pieces share exactly when one compilation serves both."""
    # Symbols are printed without quotes, so that none equals a string argument.
    numbers = {node: sympy.Symbol(f"i{k}") for k, node in enumerate(piece.inputs)}
    numbers |= {node: sympy.Symbol(f"n{k}") for k, node in enumerate(piece.nodes)}

    def describe(value: Any) -> str:
        return repr(fx.node.map_arg(value, numbers.__getitem__))

    values = [node.meta["val"] for node in piece.inputs]
    return (
        tuple(layout(v) if isinstance(v, torch.Tensor) else str(v) for v in values),
        tuple((str(node.target), describe(node.args), describe(node.kwargs)) for node in piece.nodes),
        tuple(numbers[node] for node in piece.outputs),
    )


def to_graph_module(piece: Piece) -> fx.GraphModule:
    """Returns the piece as a module: positional inputs, a tuple of outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in piece.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    for node in piece.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in piece.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


PieceCompiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_piece(piece: Piece, compiler: PieceCompiler) -> Callable[..., Any]:
    """Compiles a piece: a function of its inputs that returns a sequence of its outputs."""
    return compiler(to_graph_module(piece), _own_values(piece.inputs))


def _own_values(nodes: Sequence[fx.Node]) -> list[Any]:
    """Returns the traced values of a piece's inputs, each an object of its own: copies of a block share
    theirs, and a trace tells its inputs by them.
    """
    values = [node.meta["val"] for node in nodes]
    seen: set[int] = set()
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor) and id(value) in seen:
            with fake_mode_of([value]):
                values[number] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        seen.add(id(values[number]))
    return values


def compile_eager(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Runs the piece as traced: one ATen call per node."""
    return module.forward


def compile_aot_eager(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Runs the piece in Inductor's operations, one by one."""
    return _decompose(module, inputs).forward


class CompiledPiece:
    """A piece that Inductor compiled, from a function that empties its list of arguments."""

    def __init__(self, compiled: Callable[[list[Any]], Any]) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any) -> Any:
        """Runs the piece."""
        return self.compiled(list(args))


def compile_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], *, invariant: bool = False
) -> Callable[..., Any]:
    """Compiles the piece by Inductor for all token counts; `invariant`: no kernel is chosen by time."""
    from fxsplit_encoder._torch.inductor import compile_graph

    graph = _decompose(module, inputs)
    layouts = {} if invariant else choice_of_layouts(graph.graph)
    return CompiledPiece(compile_graph(graph, inputs, invariant=invariant, layouts=layouts))


def _decompose(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    from fxsplit_encoder._torch.inductor import select_decomp_table

    with torch.no_grad(), fake_mode_of(inputs):  # active for tensors that the piece makes itself
        return make_fx(module, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)


PIECE_COMPILERS: Mapping[str, PieceCompiler] = {
    "aot_eager": compile_aot_eager,
    "eager": compile_eager,
    "inductor": compile_inductor,
}


def piece_compiler(
    name: str | Callable[..., Any], device: torch.device, invariant: bool = False
) -> PieceCompiler:
    """Returns the compiler of a configured name; "auto" is Inductor on CUDA and eager elsewhere."""
    if callable(name):
        return name
    if name == "auto":
        name = "inductor" if device.type == "cuda" else "eager"
    if not invariant:
        return PIECE_COMPILERS[name]
    if name == "inductor":
        return functools.partial(compile_inductor, invariant=True)

    def compile_in_whole_vectors(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        module = _decompose(module, inputs) if name == "aot_eager" else module
        in_whole_vectors(module)
        return module.forward

    return compile_in_whole_vectors


_ARITHMETIC = frozenset(
    """add sub rsub mul div neg abs sign square sqrt reciprocal floor ceil round trunc remainder fmod
    floor_divide maximum minimum clamp clamp_min clamp_max relu where masked_fill fill copy clone _to_copy
    zeros_like ones_like eq ne lt le gt ge isnan isinf logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_not bitwise_xor""".split()
)

# Entries that are computed at once, at most: two vectors of 64 bytes, of the narrowest floats.
_ENTRIES = 64


def in_whole_vectors(module: fx.GraphModule) -> None:
    """Makes functions of a graph whose bits depend on an entry's place compute whole vectors."""
    for node in module.graph.nodes:
        if node.op == "call_function" and is_pointwise(node) and operation(node) not in _ARITHMETIC:
            node.target, node.args = filled_up, (node.target, *node.args)
    module.recompile()


def filled_up(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Calls a function of single entries on tensors that are filled up to whole vectors."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    shape = torch.Size(numpy.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors)))
    if not shape:
        result: Tensor = function(*args, **kwargs)
        return result
    count = shape.numel()

    def filled(argument: Any) -> Any:
        if not isinstance(argument, Tensor) or argument.dim() == 0:
            return argument
        whole = argument.new_ones(-(-count // _ENTRIES) * _ENTRIES)
        whole[:count] = argument.expand(shape).reshape(-1)
        return whole

    made = function(*map(filled, args), **{name: filled(value) for name, value in kwargs.items()})
    result = made[:count].view(shape)
    # The function gives the strides of its argument, as far as that is dense.
    like = next((t for t in tensors if t.shape == shape), None)
    if like is None or like.is_contiguous():
        return result.contiguous()
    return torch.empty_like(like, dtype=result.dtype).copy_(result)
