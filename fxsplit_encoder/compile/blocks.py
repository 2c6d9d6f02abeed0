"""Equal blocks, traced once.

Dynamo and AOT take as long for each of a tower's blocks as for the first, though all but their weights are
equal. So while a forward is traced, every block of a group of equal ones is a single op on the block's
arguments. For each group, and each layout of arguments, AOT then traces one block by itself, and a copy of
its graph takes the place of each op, with the weights of its block as inputs of the graph. What comes out is
the graph that a plain trace makes, but for operations that Dynamo spells in another way (it unpacks a tensor
by select).

A block that cannot be such an op ends the trace with an error, and the caller traces plainly: one that
returns anything but a new tensor, writes to its arguments, or leaves something behind in its attributes.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxsplit_encoder.compile.aten import to_aten
from fxsplit_encoder.compile.equal_modules import equal_modules
from fxsplit_encoder.compile.sizes import expression, layout
from fxsplit_encoder.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import sympy
    from torch import Tensor

Number = int | torch.SymInt

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("block(Tensor[] tensors, SymInt[] numbers, str structure, int group, int index) -> Tensor")
"""`structure` says how the tensors and numbers are the arguments of the group's block of this index."""


@contextlib.contextmanager
def equal_blocks_as_ops(module: nn.Module) -> Iterator[int]:
    """Makes the equal blocks of a module ops, for as long as the context lasts; yields how many blocks."""
    groups = {next(_group_numbers): _Group(blocks) for blocks in equal_modules(module)}
    _groups.update(groups)
    try:
        for number, group in groups.items():
            for index, block in enumerate(group.blocks):
                block.forward = _stub(block, number, index)
        yield sum(len(group.blocks) for group in groups.values())
    finally:
        for number, group in groups.items():
            del _groups[number]
            for block in group.blocks:
                vars(block).pop("forward", None)


def inline_blocks(module: fx.GraphModule) -> list[Tensor]:
    """Puts the graph of its block in the place of each op.

    Args:
        module: an ATen graph whose nodes carry traced values in `meta["val"]`.

    Returns:
        The weights of the blocks, which are inputs of the graph now, after those that it had.

    Raises:
        CompileError: a block does more than an op may.
    """
    inlining = _Inlining(module.graph)
    for call in module.graph.find_nodes(op="call_function", target=_block_op):
        inlining.inline(call)
    return inlining.weights


# --- the op


def _stub(block: nn.Module, group: int, index: int) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # another thread runs the module meanwhile
            return type(block).forward(block, *args, **kwargs)
        tensors: list[Tensor] = []
        numbers: list[int] = []
        structure = _take_apart((args, kwargs), tensors, numbers)
        if torch.is_autocast_enabled(tensors[0].device.type):  # below the op nothing tells
            raise CompileError("a block runs under autocast, which its own trace would not")
        return _block_op(tensors, numbers, structure, group, index)

    return forward


def _take_apart(value: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    """A value as a Python literal in which ("tensor", 0) and ("number", 0) stand for what is appended to the
    lists. Dynamo traces this. Types are exact: a named tuple, say, would be put together as another type.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return f"('tensor', {len(tensors) - 1})"
    if value is None or kind in (bool, float, str):
        return f"('constant', {value!r})"
    if kind is int:
        numbers.append(value)
        return f"('number', {len(numbers) - 1})"
    if kind in (tuple, list):
        parts = ""
        for part in value:  # Dynamo takes longer for a comprehension
            parts += _take_apart(part, tensors, numbers) + ", "
        return f"('{'list' if kind is list else 'tuple'}', [{parts}])"
    if kind is dict:
        parts = ""
        for key, part in value.items():
            parts += f"{key!r}: {_take_apart(part, tensors, numbers)}, "
        return f"('dict', {{{parts}}})"
    raise CompileError(f"a block takes a {kind.__name__}, which no op can")


def _put_together(literal: Any, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> Any:
    kind, content = literal
    if kind == "constant":
        return content
    if kind in ("tensor", "number"):
        return (tensors if kind == "tensor" else numbers)[content]
    if kind == "dict":
        return {key: _put_together(v, tensors, numbers) for key, v in content.items()}
    values = [_put_together(v, tensors, numbers) for v in content]
    return values if kind == "list" else tuple(values)


def _fake(
    tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str, group: int, index: int
) -> Tensor:
    like = _groups[group].result(tensors, numbers, structure)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


torch.library.register_fake("fxsplit::block", _fake, lib=_library)
_block_op = torch.ops.fxsplit.block.default


# --- what the op stands for


class _OriginalForward(nn.Module):
    """A block as it was before its stub."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.block).forward(self.block, *args, **kwargs)


class _Group:
    """Equal blocks, of which the first is traced."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self._original = _OriginalForward(blocks[0])
        self._forget(None)

    def _forget(self, fake_mode: Any) -> None:
        """What was traced belongs to one fake mode; Dynamo takes a new one when it starts a trace again."""
        self._fake_mode = fake_mode
        self._weights: list[Tensor] = []
        self._results: dict[Any, Tensor] = {}
        self._bodies: dict[Any, fx.GraphModule] = {}

    def result(self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> Tensor:
        """A traced tensor like the one that a block returns for these arguments."""
        if _fake_mode_of(tensors) is not self._fake_mode:
            self._forget(_fake_mode_of(tensors))
            weights = weights_of(self.blocks[0]).values()
            self._weights = [fake_weight(self._fake_mode, w) for w in weights]
        key = _key(tensors, numbers, structure)
        if key not in self._results:
            output = self._run(tensors, numbers, structure, self._weights)
            storages = {t.untyped_storage()._cdata for t in (*tensors, *self._weights)}
            if output.untyped_storage()._cdata in storages:
                raise CompileError("a block returns one of its arguments or weights, or a view of it")
            # Running it may have told that two symbols are equal.
            key = _key(tensors, numbers, structure)
            self._results[key] = output
        return self._results[key]

    def body(self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> fx.GraphModule:
        """A block's ATen graph, after its result. Its inputs are the tensors, those numbers that are symbols,
        and the weights.
        """
        key = _key(tensors, numbers, structure)
        if key not in self._bodies:
            self._bodies[key] = self._trace(tensors, numbers, structure)
        return self._bodies[key]

    def _trace(self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> fx.GraphModule:
        symbols = [n for n in numbers if isinstance(n, torch.SymInt)]

        class Body(nn.Module):
            def forward(body, *inputs: Any) -> tuple[Tensor]:
                rest = iter(inputs[len(tensors) :])
                values = [next(rest) if isinstance(n, torch.SymInt) else n for n in numbers]
                return (self._run(inputs[: len(tensors)], values, structure, list(rest)),)

        graphs: list[fx.GraphModule] = []

        def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            graphs.append(graph)
            return graph.forward

        inputs = [*tensors, *symbols, *self._weights]
        with torch._guards.tracing(torch._guards.TracingContext(self._fake_mode)), torch.no_grad():
            to_aten(Body(), inputs, keep)
        (graph,) = graphs
        return graph

    def _run(
        self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str, weights: Sequence[Tensor]
    ) -> Tensor:
        block = self.blocks[0]
        args, kwargs = _put_together(ast.literal_eval(structure), tensors, numbers)
        named = {f"block.{name}": w for name, w in zip(weights_of(block), weights, strict=True)}
        with _unchanged_attributes(block):
            output = torch.func.functional_call(self._original, named, args, kwargs)
        if not isinstance(output, torch.Tensor):
            raise CompileError(f"a block returns a {type(output).__name__}; an op returns a tensor")
        return output


_groups: dict[int, _Group] = {}
_group_numbers = itertools.count()


def weights_of(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the same order for equal blocks."""
    return dict((*block.named_parameters(), *block.named_buffers()))


def fake_weight(fake_mode: Any, weight: Tensor) -> Tensor:
    """A traced value for a weight, of constant sizes."""
    value = fake_mode.from_tensor(weight, static_shapes=True)
    assert isinstance(value, torch.Tensor)
    return value


def _fake_mode_of(tensors: Sequence[Tensor]) -> Any:
    return tensors[0].fake_mode  # type: ignore[attr-defined]


def _key(tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> Any:
    """What calls have in common that one trace serves."""
    return (structure, tuple(layout(t) for t in tensors), tuple(expression(n) for n in numbers))


@contextlib.contextmanager
def _unchanged_attributes(block: nn.Module) -> Iterator[None]:
    """Raises if a block sets attributes when it is called: what it keeps here are values of the trace."""
    before = {module: dict(vars(module)) for module in block.modules()}
    yield
    for module, attributes in before.items():
        now = vars(module)
        if now.keys() != attributes.keys() or any(now[k] is not v for k, v in attributes.items()):
            now.clear()
            now.update(attributes)
            raise CompileError(f"a block's {type(module).__name__} changes its own attributes")


# --- copies of the graph


class _Inlining:
    """Puts the graphs of blocks into a forward's graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.weights: list[Tensor] = []
        inputs = graph.find_nodes(op="placeholder")
        self._last_input: fx.Node | None = inputs[-1] if inputs else None
        self._weight_nodes: dict[tuple[int, int, str], fx.Node] = {}
        self._scalars: dict[sympy.Expr, fx.Node] = {
            expression(n.meta["val"]): n for n in inputs if isinstance(n.meta["val"], torch.SymInt)
        }

    def inline(self, call: fx.Node) -> None:
        """Puts the graph of its block in the place of an op."""
        arguments: Any = call.args
        tensors, numbers, structure, number, index = arguments
        values = fx.node.map_arg((tensors, numbers), lambda n: n.meta["val"])
        body = _groups[number].body(*values, structure)
        inputs = body.graph.find_nodes(op="placeholder")
        given = [*tensors, *(n for n in numbers if isinstance(n, fx.Node))]
        copies = dict(zip(inputs, given, strict=False))
        weights = weights_of(_groups[number].blocks[index])
        fake_mode = _fake_mode_of(values[0])
        for node, (name, weight) in zip(inputs[len(given) :], weights.items(), strict=True):
            if node.users:
                key = (number, index, name)
                if key not in self._weight_nodes:
                    self._weight_nodes[key] = self._add_weight(weight, fake_mode)
                copies[node] = self._weight_nodes[key]
        output = self._copy_body(call, body, copies)
        if layout(output.meta["val"]) != layout(call.meta["val"]):
            raise CompileError("a block's own trace returns another layout than in the forward")
        # Copies share their traced values, but no two inputs of a piece may: only results leave a block.
        output.meta["val"] = call.meta["val"]
        call.replace_all_uses_with(output)
        self.graph.erase_node(call)

    def _add_weight(self, weight: Tensor, fake_mode: Any) -> fx.Node:
        assert self._last_input is not None
        with self.graph.inserting_after(self._last_input):
            self._last_input = self.graph.placeholder(f"weight_{len(self.weights)}")
        self._last_input.meta["val"] = fake_weight(fake_mode, weight)
        self.weights.append(weight)
        return self._last_input

    def _copy_body(self, call: fx.Node, body: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        with self.graph.inserting_before(call):
            for node in body.graph.nodes:
                if node.op == "get_attr":
                    raise CompileError(f"a block makes a constant tensor, {node.target}")
                if node.op == "call_function":
                    copies[node] = self._copy(node, copies)
        results: Any = body.graph.output_node().args[0]
        if len(results) != 1:
            raise CompileError("a block writes to its arguments")
        return copies[results[0]]

    def _copy(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """A node of a block; a number that the forward has already is the node that it has."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            return self.graph.node_copy(node, copies.__getitem__)
        if expression(value) not in self._scalars:
            self._scalars[expression(value)] = self.graph.node_copy(node, copies.__getitem__)
        return self._scalars[expression(value)]
