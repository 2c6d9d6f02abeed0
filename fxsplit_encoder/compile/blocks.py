"""Traces equal blocks of a tower once, since Dynamo and AOT take as long for each as for the first.

While a forward is traced, every block of a group of equal ones is a single op. AOT traces one block for each
layout of arguments, and copies of its graph replace the ops, with the weights of each block as inputs. In the
trace of `torch.compile` with a backend of ours, a tower calls `begin_blocks` and the backend `end_blocks`.

A block that returns anything but a new tensor, writes to its arguments, or changes its attributes cannot be
an op: the trace ends with an error, and the caller traces plainly. Modules are equal if their trees are:
classes, layouts of weights, and attributes, by identity where values cannot be compared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from fxsplit_encoder._torch.aot import fake_mode_of, to_aten, tracing_context
from fxsplit_encoder._torch.dispatch import define_op
from fxsplit_encoder._torch.dynamo import backends_in_use, current_compile_id, drop_guards_on
from fxsplit_encoder._torch.peft import is_adapter_layer, unread_of
from fxsplit_encoder._torch.structure import PLACE, Held, Structure
from fxsplit_encoder._torch.tensors import INTERNALS, hooks_of, storage_id, tensors_of
from fxsplit_encoder._torch.transformers import collects_attention
from fxsplit_encoder.compile.sizes import expression, layout
from fxsplit_encoder.errors import CompileError, InputError


class BlockError(CompileError):
    """A block cannot be an op; the forward may be traced without ops."""


class ChangedBlocksError(InputError):
    """Blocks have changed since they were traced, and nothing was computed."""


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_TENSOR_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


def equal_modules(root: nn.Module) -> list[list[nn.Module]]:
    """Returns groups of equal modules among the members of each `ModuleList` outside of other groups."""
    groups: list[list[nn.Module]] = []
    inside: set[nn.Module] = set()
    for container in root.modules():
        if not isinstance(container, nn.ModuleList) or container in inside:
            continue
        alike: dict[Any, list[nn.Module]] = {}
        for member in dict.fromkeys(container):
            if _is_plain(member):
                alike.setdefault(_description(member), []).append(member)
        found = [members for members in alike.values() if len(members) > 1]
        inside.update(module for members in found for member in members for module in member.modules())
        groups += found
    return groups


def _is_plain(module: nn.Module) -> bool:
    """Whether forward is its class's, weights are plain tensors, and no hook of a submodule keeps values."""
    if "forward" in vars(module).keys() - _unread(module):
        return False
    inner = (submodule for submodule in module.modules() if submodule is not module)
    hooks = (hook for submodule in inner for hook in hooks_of(submodule))
    return all(map(collects_attention, hooks)) and all(
        type(tensor) in _TENSOR_TYPES for tensor in (*module.parameters(), *module.buffers())
    )


def _description(module: nn.Module) -> Any:
    # Tied weights have one name.
    names = tuple(name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    return names, tuple(
        (
            name,
            type(submodule),
            tuple((k, _layout(value)) for held in tensors_of(submodule) for k, value in held.items()),
            tuple(
                (key, _constant(value)) for key, value in sorted(vars(submodule).items()) if key not in unread
            ),
        )
        for name, submodule in module.named_modules(remove_duplicate=False)
        for unread in (_unread(submodule),)
    )


def _unread(module: nn.Module) -> set[str]:
    """Returns the attributes that no forward of the module's class reads, ours among them."""
    of_ops = ("forward", PLACE) if PLACE in vars(module) else ()
    return {*INTERNALS, *of_ops, *(unread_of(module) if is_adapter_layer(module) else ())}


def _layout(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _constant(value: Any) -> Any:
    """Returns a hashable stand-in for a value: equal only for values that any code treats alike."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if type(value) is functools.partial:
        return ("partial", value.func, _constant(value.args), _constant(value.keywords))
    if type(value) in (list, tuple):
        return (type(value), tuple(_constant(v) for v in value))
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return (type(value), tuple((key, _constant(v)) for key, v in value.items()))
    if isinstance(value, (set, frozenset)) and not value:
        return type(value)
    return ("object", id(value))


Number = int | torch.SymInt


def take_apart(value: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    """Returns a value as Python of `tensors` and `numbers`, to which it appends. Dynamo traces this."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "next(tensors)"
    kind = type(value)
    if kind is int:
        numbers.append(value)
        return "next(numbers)"
    if value is None or kind in (bool, float, str):
        return repr(value)
    if kind in (tuple, list):
        parts = ""
        for part in value:  # Dynamo takes longer for a comprehension
            parts += take_apart(part, tensors, numbers) + ", "
        return f"[{parts}]" if kind is list else f"({parts})"
    if kind is dict:
        parts = ""
        for key, part in value.items():
            parts += f"{key!r}: {take_apart(part, tensors, numbers)}, "
        return f"{{{parts}}}"
    raise CompileError(f"a block takes a {kind.__name__}, which no op can")


def put_together(structure: str, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> Any:
    """Returns the value that `take_apart` took apart, made of these tensors and numbers."""
    names = {"tensors": iter(tensors), "numbers": iter(numbers), "next": next}
    return eval(structure, {"__builtins__": {}, "inf": math.inf, "nan": math.nan, **names})


class Group:
    """Equal blocks of a tower, of which the first is traced."""

    def __init__(self, blocks: Sequence[nn.Module], tower: nn.Module) -> None:
        self.blocks = blocks
        self.tower = tower
        self._original = _OriginalForward(blocks[0])
        self._fake_mode: Any = None
        self._symbols: Any = None
        self._weights: list[Tensor] = []
        self._results: dict[Any, Tensor] = {}
        self._bodies: dict[Any, fx.GraphModule] = {}

    def _take_mode(self, fake_mode: Any) -> None:
        """Drops what belongs to another fake mode. AOT's has the symbols of Dynamo's, for which results stay
        what they were; Dynamo takes one with new symbols when it restarts a trace.
        """
        self._fake_mode, self._bodies = fake_mode, {}
        weights = weights_of(self.blocks[0]).values()
        self._weights = [fake_mode.from_tensor(weight, static_shapes=True) for weight in weights]
        if fake_mode.shape_env is not self._symbols:
            self._symbols, self._results = fake_mode.shape_env, {}

    def result(self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> Tensor:
        """Returns a traced tensor like the one that a block returns for these arguments."""
        if fake_mode_of(tensors) is not self._fake_mode:
            self._take_mode(fake_mode_of(tensors))
        key = _key(tensors, numbers, structure)
        if key not in self._results:
            output = self._run(tensors, numbers, structure, self._weights)
            storages = {storage_id(t) for t in (*tensors, *self._weights)}
            if storage_id(output) in storages:
                raise BlockError("a block returns one of its arguments or weights, or a view of it")
            # Running it may have told that two symbols are equal.
            key = _key(tensors, numbers, structure)
            self._results[key] = output
        return self._results[key]

    def body(self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> fx.GraphModule:
        """Returns a block's ATen graph, of the tensors, the numbers that are symbols, and the weights."""
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
        with tracing_context(self._fake_mode), torch.no_grad():
            to_aten(Body(), inputs, keep)
        (graph,) = graphs
        return graph

    def _run(
        self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str, weights: Sequence[Tensor]
    ) -> Tensor:
        block = self.blocks[0]
        args, kwargs = put_together(structure, tensors, numbers)
        named = {f"block.{name}": w for name, w in zip(weights_of(block), weights, strict=True)}
        with _unchanged_attributes(block):
            output = torch.func.functional_call(self._original, named, args, kwargs)
        if not isinstance(output, torch.Tensor):
            raise BlockError(f"a block returns a {type(output).__name__}; an op returns a tensor")
        return output


class _OriginalForward(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.block).forward(self.block, *args, **kwargs)


def weights_of(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the same order for equal blocks."""
    return dict((*block.named_parameters(), *block.named_buffers()))


class LiveWeights:
    """Weights of blocks, looked up in their modules at every call: one may be replaced."""

    def __init__(self) -> None:
        self._towers: dict[nn.Module, nn.Module] = {}
        self._places: list[tuple[dict[str, Any], str]] = []
        self._watched: list[tuple[Structure, list[bool]]] = []
        self._held: Held | None = None
        self._last: list[Tensor] = []

    def add(self, group: Group, block: nn.Module, name: str) -> None:
        """Adds a weight by its name in a block of the group."""
        path, _, key = name.rpartition(".")
        parameters, buffers = tensors_of(block.get_submodule(path))
        self._places.append((parameters if key in parameters else buffers, key))
        self._towers[block] = group.tower

    def __len__(self) -> int:
        return len(self._places)

    def watch(self) -> None:
        """Records the towers' structure, and drops Dynamo's guards on blocks, more than half of a tower's."""
        towers = set(self._towers.values())
        self._watched = [(seen, seen.modes) for seen in map(Structure, towers)]
        if len(towers) == 1:
            (tower,) = towers
            paths = [path for path, module in tower.named_modules() if module in self._towers]
            drop_guards_on(paths, PLACE, "config")

    def current(self) -> list[Tensor]:
        """Returns the weights that modules hold now, in the order of `add`; the caller must not change it.
        ChangedBlocksError: a block is not what the graph was made of. InputError: a weight was removed.
        """
        if any(not seen.is_unchanged() or seen.modes != modes for seen, modes in self._watched):
            raise ChangedBlocksError(
                "the blocks of a compiled tower have changed since they were traced: a layer was replaced, "
                "or has a hook, another forward, mode, number or configuration now; compile it again after "
                "torch._dynamo.reset()"
            )
        if self._held is None or not self._held.is_same():
            self._look_up()
        return self._last

    def _look_up(self) -> None:
        held = Held({id(holder): holder for holder, _ in self._places}.values())
        try:
            self._last = [holder[key] for holder, key in self._places]
        except KeyError as error:
            raise InputError(
                f"parameters: {error} of a compiled block was removed since; put it back, or compile again "
                "after torch._dynamo.reset()"
            ) from None
        self._held = held


def _key(tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> Any:
    return (structure, tuple(layout(t) for t in tensors), tuple(expression(n) for n in numbers))


@contextlib.contextmanager
def _unchanged_attributes(block: nn.Module) -> Iterator[None]:
    """Raises BlockError if a block sets attributes when it is called."""
    before = {module: dict(vars(module)) for module in block.modules()}
    yield
    for module, attributes in before.items():
        now = vars(module)
        if now.keys() != attributes.keys() or any(now[k] is not v for k, v in attributes.items()):
            now.clear()
            now.update(attributes)
            raise BlockError(f"a block's {type(module).__name__} changes its own attributes")


class BlockOps:
    """The groups of blocks that are ops now. Dynamo traces one frame at a time in a process."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.begun: dict[nn.Module, list[int]] = {}
        """Groups of the modules between `begin_blocks` and `end_blocks`."""
        self.compilation: Any = None
        """The one of `begun`."""
        self.refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules whose blocks are never to be ops again."""
        # Of each group, by its first block: Dynamo's guards see it, so it stays.
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._next_number = itertools.count()

    def make(self, module: nn.Module) -> list[int]:
        """Makes the equal blocks of a module ops; returns the numbers of their groups."""
        found = {
            self._numbers.setdefault(blocks[0], next(self._next_number)): blocks
            for blocks in equal_modules(module)
        }
        _install(module, found)
        self.groups.update((number, Group(blocks, module)) for number, blocks in found.items())
        return list(found)

    def end(self, numbers: Iterable[int]) -> None:
        """Makes the blocks of these groups run as modules; they keep a `forward` that calls their own."""
        for number in numbers:
            del self.groups[number]


block_ops = BlockOps()


@contextlib.contextmanager
def equal_blocks_as_ops(module: nn.Module) -> Iterator[int]:
    """Makes the equal blocks of a module ops inside the context; yields how many blocks."""
    untouched = [block for block in module.modules() if PLACE not in vars(block)]
    numbers = block_ops.make(module)
    try:
        yield sum(len(block_ops.groups[number].blocks) for number in numbers)
    finally:
        block_ops.end(numbers)
        for block in untouched:
            if PLACE in vars(block):
                del block.forward, block._fxsplit_place


def _install(module: nn.Module, groups: Mapping[int, Sequence[nn.Module]]) -> None:
    """Gives blocks of groups the `forward` that may be an op, and other modules their own back."""
    places = {block: (number, i) for number, blocks in groups.items() for i, block in enumerate(blocks)}
    for block in module.modules():
        own, place = vars(block), places.get(block)
        if place is None:
            if PLACE in own:
                del block.forward, block._fxsplit_place
        elif own.get(PLACE) != place or getattr(own.get("forward"), "__func__", None) is not forward:
            block.forward = types.MethodType(forward, block)
            own[PLACE] = place


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a block as an op while it is traced, else by its own forward."""
    group, index = self._fxsplit_place  # type: ignore[misc]
    if not (torch.compiler.is_dynamo_compiling() and _is_op(group)):
        return type(self).forward(self, *args, **kwargs)
    tensors: list[Tensor] = []
    numbers: list[int] = []
    structure = f"{take_apart(args, tensors, numbers)}, {take_apart(kwargs, tensors, numbers)}"
    if torch.is_autocast_enabled(tensors[0].device.type):  # below the op nothing tells
        raise CompileError("a block runs under autocast, which its own trace would not")
    return block_op(tensors, numbers, structure, group, index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_op(group: int) -> bool:
    return group in block_ops.groups


def _fake(
    tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str, group: int, index: int
) -> Tensor:
    like = block_ops.groups[group].result(tensors, numbers, structure)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


block_op = define_op(
    "block(Tensor[] tensors, SymInt[] numbers, str structure, int group, int index) -> Tensor", {}, _fake
)
"""`structure` says how the tensors and numbers are the arguments of the group's block of this index."""


def takes_blocks(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a backend of torch.compile that replaces block ops by their graphs and calls `end_blocks`."""
    backend._fxsplit_takes_blocks = True  # type: ignore[attr-defined]
    return backend


def begin_blocks(module: nn.Module) -> bool:
    """Makes the equal blocks of a module ops until `end_blocks`, if Dynamo traces it for a backend that takes
    them; returns whether they are. Called during a trace, from a frame that Dynamo does not trace.

    Blocks keep a `forward` of ours, since Dynamo's guards check it at every call.
    """
    ops, compilation = block_ops, current_compile_id()
    if ops.compilation != compilation:  # of a trace that failed before its backend was called
        end_blocks()
    # The trace of a block knows nothing of gradients and autocast.
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if torch.is_grad_enabled() or autocast or module in ops.refused:
        return False
    if not any(getattr(backend, "_fxsplit_takes_blocks", False) for backend in backends_in_use()):
        return False
    if module not in ops.begun:
        ops.begun[module] = ops.make(module)
        ops.compilation = compilation
    return True


def end_blocks(*, refused: bool = False) -> bool:
    """Ends the ops of `begin_blocks`, for good if `refused`; returns whether there were any."""
    begun, block_ops.begun = block_ops.begun, {}
    numbers = [*itertools.chain.from_iterable(begun.values())]
    block_ops.end(numbers)
    if refused:
        block_ops.refused.update(begun)
    return bool(numbers)


def inline_blocks(module: fx.GraphModule) -> LiveWeights:
    """Replaces each block op of an ATen graph by the graph of its block; returns the weights of the blocks,
    now the last inputs of the graph. CompileError: a block does more than an op may.
    """
    inlining = _Inlining(module.graph)
    for call in module.graph.find_nodes(op="call_function", target=block_op):
        inlining.inline(call)
    return inlining.weights


class _Inlining:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.weights = LiveWeights()
        inputs = graph.find_nodes(op="placeholder")
        self._last_input: fx.Node | None = inputs[-1] if inputs else None
        self._weight_nodes: dict[tuple[int, int, str], fx.Node] = {}
        self._scalars: dict[sympy.Expr, fx.Node] = {
            expression(n.meta["val"]): n for n in inputs if isinstance(n.meta["val"], torch.SymInt)
        }

    def inline(self, call: fx.Node) -> None:
        arguments: Any = call.args
        tensors, numbers, structure, number, index = arguments
        values = fx.node.map_arg((tensors, numbers), lambda n: n.meta["val"])
        group = block_ops.groups[number]
        block = group.blocks[index]
        body = group.body(*values, structure)
        inputs = body.graph.find_nodes(op="placeholder")
        given = [*tensors, *(n for n in numbers if isinstance(n, fx.Node))]
        copies = dict(zip(inputs, given, strict=False))
        fake_mode = fake_mode_of(values[0])
        for node, (name, weight) in zip(inputs[len(given) :], weights_of(block).items(), strict=True):
            if node.users:
                key = (number, index, name)
                if key not in self._weight_nodes:
                    self._weight_nodes[key] = self._add_weight(weight, fake_mode)
                    self.weights.add(group, block, name)
                copies[node] = self._weight_nodes[key]
        output = self._copy_body(call, body, copies)
        if layout(output.meta["val"]) != layout(call.meta["val"]):
            raise BlockError("a block's own trace returns another layout than in the forward")
        call.replace_all_uses_with(output)
        self.graph.erase_node(call)

    def _add_weight(self, weight: Tensor, fake_mode: Any) -> fx.Node:
        assert self._last_input is not None
        with self.graph.inserting_after(self._last_input):
            self._last_input = self.graph.placeholder(f"weight_{len(self.weights)}")
        self._last_input.meta["val"] = fake_mode.from_tensor(weight, static_shapes=True)
        return self._last_input

    def _copy_body(self, call: fx.Node, body: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        with self.graph.inserting_before(call):
            for node in body.graph.nodes:
                if node.op == "get_attr":
                    raise BlockError(f"a block makes a constant tensor, {node.target}")
                if node.op == "call_function":
                    copies[node] = self._copy(node, copies)
        results: Any = body.graph.output_node().args[0]
        if len(results) != 1:
            raise BlockError("a block writes to its arguments")
        return copies[results[0]]

    def _copy(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copies a node of a block; for a number that the forward has it returns the forward's node."""
        value = node.meta.get("val")
        number = expression(value) if isinstance(value, torch.SymInt) else None
        if number in self._scalars:
            return self._scalars[number]
        copy = self.graph.node_copy(node, copies.__getitem__)
        if number is not None:
            self._scalars[number] = copy
        return copy
