"""Splits an ATen inference graph at splitting and host ops, and finds the symbol that counts tokens."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.dispatch import OpOverload
from fxsplit_encoder._torch.symbols import has_hint
from fxsplit_encoder.compile.options import host_op
from fxsplit_encoder.compile.pieces import Piece
from fxsplit_encoder.compile.rewriting import BESIDE, node_value
from fxsplit_encoder.compile.sizes import expression, symbol_of, symbol_sources
from fxsplit_encoder.errors import CompileError

aten = torch.ops.aten

_SIZE_QUERIES = (
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
)
# Assertions on sizes, which tracing inserts; the guards of the trace state the same.
_ASSERTIONS = (
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)


Part: TypeAlias = Piece | fx.Node
"""What a graph is split into: a piece, or the node of a splitting or host op."""


def split_graph(module: fx.GraphModule, targets: frozenset[Any]) -> list[Part]:
    """Cuts a graph at every node whose target is in `targets` or is a registered host op; CompileError: a
    size depends on tensor values computed inside the graph.
    """

    def is_cut(node: Any) -> bool:
        return node.target in targets or host_op(node.target) is not None

    parts: list[list[fx.Node] | fx.Node] = [[]]
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if is_scalar(node):
            _require_symbolic(node)
        elif is_cut(node):
            parts += [node, []]
        elif node.target not in _ASSERTIONS and not (
            node.target is operator.getitem and is_cut(node.args[0])
        ):
            assert isinstance(parts[-1], list)
            parts[-1].append(node)
    symbols = _symbol_nodes(module.graph)
    returned: Any = module.graph.output_node().args[0]
    split: list[Part] = []
    for part in parts:
        split += [part] if isinstance(part, fx.Node) else _pieces(part, returned, symbols)
    return split


def unpacked_from(cut: fx.Node) -> list[fx.Node]:
    """Returns the nodes that unpack the results of a splitting or host op."""
    return [user for user in cut.users if user.target is operator.getitem and not is_scalar(user)]


def is_scalar(node: fx.Node) -> bool:
    """Whether a node computes a number rather than a tensor."""
    value = node_value(node)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def _require_symbolic(node: fx.Node) -> None:
    reads_tensors = any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)
    if reads_tensors and node.target not in _SIZE_QUERIES:
        raise CompileError(
            f"{node.target} reads a tensor's value on the host ({node.name}); such a graph cannot be split. "
            "Compute the number outside the compiled module"
        )


def _pieces(nodes: Sequence[fx.Node], output_args: Iterable[Any], symbols: Iterable[fx.Node]) -> list[Piece]:
    """Returns the nodes between two cuts as one piece, or two, the second for a side stream."""
    aside = [node for node in nodes if BESIDE in node.meta]
    rest = [node for node in nodes if BESIDE not in node.meta]
    pieces = ((rest, False), (aside, True))
    return [_piece(part, output_args, symbols, beside=beside) for part, beside in pieces if part]


def _piece(
    nodes: list[fx.Node], output_args: Iterable[Any], symbols: Iterable[fx.Node], *, beside: bool
) -> Piece:
    inside = set(nodes)
    returned = {a for a in output_args if isinstance(a, fx.Node)}
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    if any(_is_symbolic(node) for node in (*inputs, *nodes)):
        # A compiler cannot solve (s // 16) ** 2 for s, and Inductor's cache looks for every symbol that the
        # trace has guards on among a graph's own inputs.
        inputs.update(dict.fromkeys(symbols))
    outputs = [n for n in nodes if n in returned or any(user not in inside for user in n.users)]
    return Piece(tuple(nodes), tuple(inputs), tuple(outputs), beside)


def _symbol_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Returns a node for the value of every backed symbol of the graph's inputs."""
    inputs = graph.find_nodes(op="placeholder")
    found: list[fx.Node] = []
    for _, index, dim in symbol_sources(inputs):
        node = inputs[index]
        size = node.meta["val"] if dim < 0 else node.meta["val"].shape[dim]
        if has_hint(size):  # others are in no guard
            if dim >= 0:
                with graph.inserting_after(node):
                    node = graph.call_function(aten.sym_size.int, (node, dim))
                node.meta["val"] = size
            found.append(node)
    return found


def _is_symbolic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else (value,)
    return any(
        isinstance(size, torch.SymInt) for t in tensors if isinstance(t, torch.Tensor) for size in t.shape
    )


_ATTENTION_NAME = re.compile("attention|attn|sdpa", re.IGNORECASE)


def token_count_of(parts: Sequence[Part], splitting_ops: Sequence[str]) -> tuple[str | None, str]:
    """Returns the symbol in the leading size of the splitting ops' queries, or, where those are constant, in
    the first size that is not; without such a symbol, None and why.
    """
    queries = [query for _, query in _queries(parts)]
    leading = {symbol_of(query.shape[0]) for query in queries if query.dim()}
    if len(leading) > 1:
        return None, (
            f"attention runs over different token counts ({sorted(map(str, leading))}); expected "
            "one symbol in the leading size of every query"
        )
    symbols = leading if leading != {None} else {_first_symbol(query) for query in queries}
    symbol = next(iter(symbols)) if len(symbols) == 1 else None
    return symbol, "" if symbol is not None else _tokens_unknown(parts, splitting_ops)


def _first_symbol(query: Tensor) -> str | None:
    varying = next((symbols for size in query.shape if (symbols := expression(size).free_symbols)), ())
    return str(next(iter(varying))) if len(varying) == 1 else None


def _tokens_unknown(parts: Sequence[Part], splitting_ops: Sequence[str]) -> str:
    """Returns the reason why the queries have no token symbol."""
    seen = [f"{op} over {tuple(query.shape)}" for op, query in _queries(parts)]
    if seen:
        return (
            f"its splitting ops ({', '.join(dict.fromkeys(seen))}) do not have one size that varies, which "
            "would count its tokens"
        )
    nodes = (node for part in parts for node in ([part] if isinstance(part, fx.Node) else part.nodes))
    ops = (_name_of(node.target) for node in nodes if isinstance(node.target, OpOverload))
    others = [op for op in ops if _ATTENTION_NAME.search(op)]
    hint = f"; {' and '.join(dict.fromkeys(others))} in its graph could be listed there" if others else ""
    return (
        "it has no splitting op, so nothing tells which of its sizes counts tokens: none of splitting_ops "
        f"({', '.join(splitting_ops)}) is in its graph{hint}"
    )


def _queries(parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    for part in parts:
        if isinstance(part, fx.Node) and host_op(part.target) is None:
            values = (node.meta.get("val") for node in part.all_input_nodes)
            query = next((value for value in values if isinstance(value, torch.Tensor)), None)
            if query is not None:
                yield _name_of(part.target), query


def _name_of(target: Any) -> str:
    """Returns an op without its overload, as in `splitting_ops`."""
    return str(target.name()).split(".")[0]
