"""Equal blocks of a tower, traced once.

Dynamo and AOT take as long for each block as for the first, though all but their weights are equal. So while
a forward is traced, every block of a group of equal ones is a single op on the block's arguments. For each
group, and each layout of arguments, AOT traces one block by itself, and a copy of its graph replaces each op,
with the weights of its block as inputs. The result is the graph of a plain trace, but for operations that
Dynamo spells in another way.

A block that returns anything but a new tensor, writes to its arguments, or changes its attributes cannot be
such an op: the trace ends with an error, and the caller traces plainly. In the trace of `torch.compile` with
a backend of ours, a tower calls `begin_blocks` and the backend `end_blocks`.

Two modules are equal if their trees are: the same classes, parameters and buffers of the same layouts, and
attributes of the same values. What cannot be compared by value is compared by identity, so that doubt makes
modules unequal, which costs time but never a result.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from fxsplit_encoder._torch.aot import fake_mode_of, to_aten, tracing_context
from fxsplit_encoder._torch.dynamo import backends_in_use, current_compile_id, drop_guards_on
from fxsplit_encoder._torch.structure import PLACE, Held, Structure
from fxsplit_encoder._torch.tensors import INTERNALS, hooks_of, storage_id, tensors_of
from fxsplit_encoder._torch.transformers import collects_attention
from fxsplit_encoder.compile.sizes import expression, layout
from fxsplit_encoder.errors import CompileError, InputError


class BlockError(CompileError):
    """A block cannot be an op. The forward may still be traced block by block."""


class ChangedBlocksError(InputError):
    """Blocks have changed since they were traced. Nothing was computed; trace again."""


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_TENSOR_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


def equal_modules(root: nn.Module) -> list[list[nn.Module]]:
    """Returns groups of two or more equal modules among the members of each `ModuleList` of a model, without
    members that lie in a module of another group.
    """
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
    """Whether its forward is its class's, submodules have no hooks, which may keep what they see, and every
    weight is a plain tensor. The module's own hooks run where it is called.
    """
    if "forward" in vars(module):
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
                (key, _constant(value))
                for key, value in sorted(vars(submodule).items())
                if key not in INTERNALS
            ),
        )
        for name, submodule in module.named_modules(remove_duplicate=False)
    )


def _layout(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _constant(value: Any) -> Any:
    """A hashable stand-in for a value: equal only for values that any code treats alike."""
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
    """Returns a value as a Python literal in which ("tensor", 0) and ("number", 0) refer to the lists, to
    which it appends. Dynamo traces this. Types are exact: a named tuple would come back as another type.
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
            parts += take_apart(part, tensors, numbers) + ", "
        return f"('{'list' if kind is list else 'tuple'}', [{parts}])"
    if kind is dict:
        parts = ""
        for key, part in value.items():
            parts += f"{key!r}: {take_apart(part, tensors, numbers)}, "
        return f"('dict', {{{parts}}})"
    raise CompileError(f"a block takes a {kind.__name__}, which no op can")


def put_together(structure: str, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> Any:
    """Returns the value that `take_apart` took apart, made of these tensors and numbers."""
    return _value(ast.literal_eval(structure), tensors, numbers)


def _value(literal: Any, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> Any:
    kind, content = literal
    if kind == "constant":
        return content
    if kind in ("tensor", "number"):
        return (tensors if kind == "tensor" else numbers)[content]
    if kind == "dict":
        return {key: _value(v, tensors, numbers) for key, v in content.items()}
    values = [_value(v, tensors, numbers) for v in content]
    return values if kind == "list" else tuple(values)


class Group:
    """Equal blocks of a tower, of which the first is traced."""

    def __init__(self, blocks: Sequence[nn.Module], tower: nn.Module) -> None:
        self.blocks = blocks
        self.tower = tower
        self._original = _OriginalForward(blocks[0])
        self._forget(None)

    def _forget(self, fake_mode: Any) -> None:
        """Drops traced values: Dynamo takes a new fake mode when it restarts a trace."""
        self._fake_mode = fake_mode
        self._weights: list[Tensor] = []
        self._results: dict[Any, Tensor] = {}
        self._bodies: dict[Any, fx.GraphModule] = {}

    def result(self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> Tensor:
        """Returns a traced tensor like the one that a block returns for these arguments."""
        if fake_mode_of(tensors) is not self._fake_mode:
            self._forget(fake_mode_of(tensors))
            weights = weights_of(self.blocks[0]).values()
            self._weights = [fake_weight(self._fake_mode, w) for w in weights]
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
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._watched: list[tuple[Structure, list[bool]]] = []
        self._held: Held | None = None
        self._last: list[Tensor] = []

    def add(self, group: Group, index: int, name: str) -> None:
        """Adds a weight by its name in a block."""
        block = group.blocks[index]
        path, _, key = name.rpartition(".")
        parameters, buffers = tensors_of(block.get_submodule(path))
        self._holders.append(parameters if key in parameters else buffers)
        self._keys.append(key)
        self._towers[block] = group.tower

    def __len__(self) -> int:
        return len(self._keys)

    def watch(self) -> None:
        """Records the towers as the graph was made of them, and drops Dynamo's guards on blocks and the
        configuration: for a tower of 27 blocks more than half of its guards.
        """
        towers = set(self._towers.values())
        self._watched = [(seen, seen.modes) for seen in map(Structure, towers)]
        if len(towers) == 1:
            (tower,) = towers
            paths = [path for path, module in tower.named_modules() if module in self._towers]
            drop_guards_on(paths, PLACE, "config")

    def current(self) -> list[Tensor]:
        """Returns what the modules hold now, in the order of `add`. The list is not the caller's.

        Raises:
            ChangedBlocksError: a block is no longer what the graph was made of.
            InputError: a weight was removed.
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
        held = Held({id(holder): holder for holder in self._holders}.values())
        try:
            self._last = list(map(getitem, self._holders, self._keys))
        except KeyError as error:
            raise InputError(
                f"parameters: {error} of a compiled block was removed since; put it back, or compile again "
                "after torch._dynamo.reset()"
            ) from None
        self._held = held


def fake_weight(fake_mode: Any, weight: Tensor) -> Tensor:
    """Returns a traced value for a weight, of constant sizes."""
    value = fake_mode.from_tensor(weight, static_shapes=True)
    assert isinstance(value, torch.Tensor)
    return value


def _key(tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> Any:
    """What calls share that one trace serves."""
    return (structure, tuple(layout(t) for t in tensors), tuple(expression(n) for n in numbers))


@contextlib.contextmanager
def _unchanged_attributes(block: nn.Module) -> Iterator[None]:
    """Raises BlockError if a block sets attributes when it is called: they would hold values of the trace."""
    before = {module: dict(vars(module)) for module in block.modules()}
    yield
    for module, attributes in before.items():
        now = vars(module)
        if now.keys() != attributes.keys() or any(now[k] is not v for k, v in attributes.items()):
            now.clear()
            now.update(attributes)
            raise BlockError(f"a block's {type(module).__name__} changes its own attributes")


_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("block(Tensor[] tensors, SymInt[] numbers, str structure, int group, int index) -> Tensor")
"""`structure` says how the tensors and numbers are the arguments of the group's block of this index."""
block_op = torch.ops.fxsplit.block.default

_groups: dict[int, Group] = {}

_numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""The number of each group, by its first block: Dynamo's guards see it, so it stays."""
_next_number = itertools.count()


@contextlib.contextmanager
def equal_blocks_as_ops(module: nn.Module) -> Iterator[int]:
    """Makes the equal blocks of a module ops inside the context; yields how many blocks."""
    untouched = [block for block in module.modules() if PLACE not in vars(block)]
    numbers = make_ops(module)
    try:
        yield sum(len(_groups[number].blocks) for number in numbers)
    finally:
        end_ops(numbers)
        for block in untouched:
            if PLACE in vars(block):
                del block.forward, block._fxsplit_place


def make_ops(module: nn.Module) -> list[int]:
    """Makes the equal blocks of a module ops; returns the numbers of their groups."""
    groups = _numbered_groups(module)
    _release_others(module, groups)
    _install(groups)
    _groups.update(groups)
    return list(groups)


def end_ops(numbers: Iterable[int]) -> None:
    """Makes the blocks of these groups run as modules again; they keep a `forward` that calls their own."""
    for number in numbers:
        del _groups[number]


def _numbered_groups(module: nn.Module) -> dict[int, Group]:
    groups = {}
    with _uninstalled(module):
        found = equal_modules(module)
    for blocks in found:
        if blocks[0] not in _numbers:
            _numbers[blocks[0]] = next(_next_number)
        groups[_numbers[blocks[0]]] = Group(blocks, module)
    return groups


@contextlib.contextmanager
def _uninstalled(module: nn.Module) -> Iterator[None]:
    """Removes what `_install` gave to blocks, by which no two of them are equal."""
    installed = [vars(block) for block in module.modules() if PLACE in vars(block)]
    given = [(own.pop("forward"), own.pop(PLACE)) for own in installed]
    try:
        yield
    finally:
        for own, (own_forward, place) in zip(installed, given, strict=True):
            own["forward"], own[PLACE] = own_forward, place


def _install(groups: Mapping[int, Group]) -> None:
    """Gives blocks the `forward` that may be an op."""
    for number, group in groups.items():
        for index, block in enumerate(group.blocks):
            place = number, index
            own = vars(block)
            if own.get(PLACE) != place or getattr(own.get("forward"), "__func__", None) is not forward:
                block.forward = types.MethodType(forward, block)
                block._fxsplit_place = place  # type: ignore[assignment]


def _release_others(module: nn.Module, groups: Mapping[int, Group]) -> None:
    """Gives blocks that are no longer equal to others their own `forward` back."""
    members = {block for group in groups.values() for block in group.blocks}
    for block in module.modules():
        if PLACE in vars(block) and block not in members:
            del block.forward, block._fxsplit_place


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a block as an op while it is traced, else by its own forward."""
    group, index = self._fxsplit_place  # type: ignore[misc]
    if not (torch.compiler.is_dynamo_compiling() and _is_op(group)):
        return type(self).forward(self, *args, **kwargs)
    tensors: list[Tensor] = []
    numbers: list[int] = []
    structure = take_apart((args, kwargs), tensors, numbers)
    if torch.is_autocast_enabled(tensors[0].device.type):  # below the op nothing tells
        raise CompileError("a block runs under autocast, which its own trace would not")
    return block_op(tensors, numbers, structure, group, index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_op(group: int) -> bool:
    return group in _groups


def _fake(
    tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str, group: int, index: int
) -> Tensor:
    like = _groups[group].result(tensors, numbers, structure)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


torch.library.register_fake("fxsplit::block", _fake, lib=_library)


def takes_blocks(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a backend of torch.compile that replaces block ops by their graphs and calls `end_blocks`."""
    backend._fxsplit_takes_blocks = True  # type: ignore[attr-defined]
    return backend


def begin_blocks(module: nn.Module) -> bool:
    """Makes the equal blocks of a module ops until `end_blocks`, if Dynamo traces it for a backend that takes
    them; returns whether they are. Called during a trace, from a frame that Dynamo does not trace.

    Not with gradients or under autocast, of which the trace of a block knows nothing. The blocks keep a
    `forward` of ours, since Dynamo's guards check it at every call.
    """
    compilation = current_compile_id()
    if _open.compilation != compilation:  # of a trace that failed before its backend was called
        end_blocks()
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if torch.is_grad_enabled() or autocast or module in _refused:
        return False
    if not any(getattr(backend, "_fxsplit_takes_blocks", False) for backend in backends_in_use()):
        return False
    if module not in _open.modules:
        _open.modules.append(module)
        _open.groups += make_ops(module)
        _open.compilation = compilation
    return True


def end_blocks(*, refused: bool = False) -> bool:
    """Ends all that `begin_blocks` made ops; returns whether any was.

    Args:
        refused: whether the blocks of these modules are never to be ops again.
    """
    had_blocks = bool(_open.groups)
    end_ops(_open.groups)
    if refused:
        _refused.update(_open.modules)
    _open.groups.clear()
    _open.modules.clear()
    return had_blocks


class _Open:
    """Blocks between `begin_blocks` and `end_blocks`. Dynamo traces one frame at a time in a process."""

    def __init__(self) -> None:
        self.compilation: Any = None
        self.modules: list[nn.Module] = []
        self.groups: list[int] = []


_open = _Open()
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def inline_blocks(module: fx.GraphModule) -> LiveWeights:
    """Replaces each block op by the graph of its block.

    Args:
        module: an ATen graph whose nodes carry traced values in `meta["val"]`.

    Returns:
        The weights of the blocks, which are now the last inputs of the graph.

    Raises:
        CompileError: a block does more than an op may.
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
        """Replaces an op by the graph of its block."""
        arguments: Any = call.args
        tensors, numbers, structure, number, index = arguments
        values = fx.node.map_arg((tensors, numbers), lambda n: n.meta["val"])
        group = _groups[number]
        body = group.body(*values, structure)
        inputs = body.graph.find_nodes(op="placeholder")
        given = [*tensors, *(n for n in numbers if isinstance(n, fx.Node))]
        copies = dict(zip(inputs, given, strict=False))
        weights = weights_of(group.blocks[index])
        fake_mode = fake_mode_of(values[0])
        for node, (name, weight) in zip(inputs[len(given) :], weights.items(), strict=True):
            if node.users:
                key = (number, index, name)
                if key not in self._weight_nodes:
                    self._weight_nodes[key] = self._add_weight(weight, fake_mode)
                    self.weights.add(group, index, name)
                copies[node] = self._weight_nodes[key]
        output = self._copy_body(call, body, copies)
        if layout(output.meta["val"]) != layout(call.meta["val"]):
            raise BlockError("a block's own trace returns another layout than in the forward")
        # Copies share their traced values, but no two inputs of a piece may: only results leave a block.
        output.meta["val"] = call.meta["val"]
        call.replace_all_uses_with(output)
        self.graph.erase_node(call)

    def _add_weight(self, weight: Tensor, fake_mode: Any) -> fx.Node:
        assert self._last_input is not None
        with self.graph.inserting_after(self._last_input):
            self._last_input = self.graph.placeholder(f"weight_{len(self.weights)}")
        self._last_input.meta["val"] = fake_weight(fake_mode, weight)
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
        if not isinstance(value, torch.SymInt):
            return self.graph.node_copy(node, copies.__getitem__)
        if expression(value) not in self._scalars:
            self._scalars[expression(value)] = self.graph.node_copy(node, copies.__getitem__)
        return self._scalars[expression(value)]
