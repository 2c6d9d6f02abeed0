"""Equal blocks: which modules of a model are equal, a block's arguments as those of an op, and a group of
blocks, of which the first is traced for all.

Two modules are equal if their trees are: the same classes, parameters and buffers of the same layouts, and
attributes of the same values. What cannot be compared by value is compared by identity, so that doubt makes
modules unequal, which costs time but never a result.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit_encoder._torch.aot import fake_mode_of, to_aten, tracing_context
from fxsplit_encoder._torch.dynamo import drop_guards_on
from fxsplit_encoder._torch.modules import PLACE, Held
from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder._torch.tensors import INTERNALS, hooks_of, storage_id, tensors_of
from fxsplit_encoder._torch.transformers import collects_attention
from fxsplit_encoder.compile.sizes import expression, layout
from fxsplit_encoder.errors import CompileError, InputError


class BlockError(CompileError):
    """A block cannot be an op. The forward may be traced all the same, block by block."""


class ChangedBlocksError(InputError):
    """Blocks are no longer what a graph was made of. Nothing was computed; another trace has them right."""


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_TENSOR_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


def equal_modules(root: nn.Module) -> list[list[nn.Module]]:
    """The groups of equal modules, two or more each, among the members of each `ModuleList` of a model.

    Members that lie in a module of another group are left out.
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
    """Whether its forward is its class's, no submodule has hooks, and no weight is more than a tensor.

    Hooks may keep what they see, as those that collect hidden states do, and a trace of one module cannot do
    that for another. The module's own hooks run where it is called.
    """
    if "forward" in vars(module):
        return False
    inner = (submodule for submodule in module.modules() if submodule is not module)
    hooks = (hook for submodule in inner for hook in hooks_of(submodule))
    return all(map(collects_attention, hooks)) and all(
        type(tensor) in _TENSOR_TYPES for tensor in (*module.parameters(), *module.buffers())
    )


def _description(module: nn.Module) -> Any:
    """What equal modules share, and others do not."""
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
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


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
            parts += take_apart(part, tensors, numbers) + ", "
        return f"('{'list' if kind is list else 'tuple'}', [{parts}])"
    if kind is dict:
        parts = ""
        for key, part in value.items():
            parts += f"{key!r}: {take_apart(part, tensors, numbers)}, "
        return f"('dict', {{{parts}}})"
    raise CompileError(f"a block takes a {kind.__name__}, which no op can")


def put_together(structure: str, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> Any:
    """The value that `take_apart` took apart, of these tensors and numbers."""
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
        """What was traced belongs to one fake mode; Dynamo takes a new one when it starts a trace again."""
        self._fake_mode = fake_mode
        self._weights: list[Tensor] = []
        self._results: dict[Any, Tensor] = {}
        self._bodies: dict[Any, fx.GraphModule] = {}

    def result(self, tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str) -> Tensor:
        """A traced tensor like the one that a block returns for these arguments."""
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
    """A block as it was before its stub."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.block).forward(self.block, *args, **kwargs)


def weights_of(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the same order for equal blocks."""
    return dict((*block.named_parameters(), *block.named_buffers()))


class LiveWeights:
    """Weights of blocks, looked up at every call where their modules hold them: one may be replaced."""

    def __init__(self) -> None:
        self._towers: dict[nn.Module, nn.Module] = {}
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._watched: list[tuple[Structure, list[bool]]] = []
        self._held: Held | None = None
        self._last: list[Tensor] = []

    def add(self, group: Group, index: int, name: str) -> None:
        """Another one, by its name in a block."""
        block = group.blocks[index]
        path, _, key = name.rpartition(".")
        parameters, buffers = tensors_of(block.get_submodule(path))
        self._holders.append(parameters if key in parameters else buffers)
        self._keys.append(key)
        self._towers[block] = group.tower

    def __len__(self) -> int:
        return len(self._keys)

    def watch(self) -> None:
        """Takes the towers as they are now for what the graph was made of. Dynamo need not look at blocks any
        more, nor at the tower's configuration: of a tower of 27 blocks that is more than half of its guards.
        """
        towers = set(self._towers.values())
        self._watched = [(seen, seen.modes) for seen in map(Structure, towers)]
        if len(towers) == 1:
            (tower,) = towers
            paths = [path for path, module in tower.named_modules() if module in self._towers]
            drop_guards_on(paths, PLACE, "config")

    def current(self) -> list[Tensor]:
        """What the modules hold now, in the order in which it was added. The list is not the caller's.

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
    """A traced value for a weight, of constant sizes."""
    value = fake_mode.from_tensor(weight, static_shapes=True)
    assert isinstance(value, torch.Tensor)
    return value


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
            raise BlockError(f"a block's {type(module).__name__} changes its own attributes")
