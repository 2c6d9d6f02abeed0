"""The op that stands for a block while a forward is traced."""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.compile.blocks.arguments import take_apart
from fxsplit_encoder.compile.blocks.group import Group
from fxsplit_encoder.compile.equal_modules import equal_modules
from fxsplit_encoder.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from fxsplit_encoder.compile.blocks.arguments import Number

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("block(Tensor[] tensors, SymInt[] numbers, str structure, int group, int index) -> Tensor")
"""`structure` says how the tensors and numbers are the arguments of the group's block of this index."""
block_op = torch.ops.fxsplit.block.default

_groups: dict[int, Group] = {}
"""Those whose blocks are ops now."""

_numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""The number of each group, by its first block: Dynamo's guards see it, so it stays."""
_next_number = itertools.count()

_PLACE = "_fxsplit_place"


@contextlib.contextmanager
def equal_blocks_as_ops(module: nn.Module) -> Iterator[int]:
    """Makes the equal blocks of a module ops, for as long as the context lasts; yields how many blocks."""
    groups = _numbered_groups(module)
    blocks = [block for group in groups.values() for block in group.blocks]
    untouched = [block for block in blocks if _PLACE not in vars(block)]
    _install(groups)
    _groups.update(groups)
    try:
        yield len(blocks)
    finally:
        for number in groups:
            del _groups[number]
        for block in untouched:
            del block.forward, block._fxsplit_place


def begin_blocks(module: nn.Module) -> bool:
    """Makes the equal blocks of a module ops until `end_blocks`, if Dynamo traces it now for a backend that
    takes them. Called in the midst of a trace, from outside of it. Returns whether it did.

    Not with gradients or under autocast, of which the trace of a block knows nothing. The blocks keep a
    `forward` of ours from then on, since Dynamo's guards look at it at every call; it calls their own.
    """
    compilation = torch._guards.CompileContext.current_compile_id()
    if _open.compilation != compilation:  # of a trace that failed before its backend was called
        end_blocks()
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if torch.is_grad_enabled() or autocast or module in _refused or not _backend_takes_blocks():
        return False
    if module not in _open.modules:
        groups = _numbered_groups(module)
        _install(groups)
        _groups.update(groups)
        _open.groups += groups
        _open.modules.append(module)
        _open.compilation = compilation
    return True


def end_blocks(*, refused: bool = False) -> bool:
    """Lets no block be an op any more; returns whether any was.

    Args:
        refused: whether the blocks of these modules shall never be ops again.
    """
    had_blocks = bool(_open.groups)
    for number in _open.groups:
        del _groups[number]
    if refused:
        _refused.update(_open.modules)
    _open.groups.clear()
    _open.modules.clear()
    return had_blocks


def takes_blocks(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a backend of torch.compile that puts the graphs of blocks in the places of their ops, and calls
    `end_blocks` when it is done.
    """
    backend._takes_blocks = True  # type: ignore[attr-defined]
    return backend


class _Open:
    """What `begin_blocks` began. Dynamo traces one frame at a time in a process."""

    def __init__(self) -> None:
        self.compilation: Any = None
        self.modules: list[nn.Module] = []
        self.groups: list[int] = []


_open = _Open()
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# Attributes under which Dynamo's wrappers of a backend have what they wrap.
_WRAPPED = ("compiler_fn", "__wrapped__", "_torchdynamo_orig_backend")


def _backend_takes_blocks() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    while backend is not None:
        if getattr(backend, "_takes_blocks", False):
            return True
        inner = (getattr(backend, name, None) for name in _WRAPPED)
        backend = next((each for each in inner if each is not None), None)
    return False


def _numbered_groups(module: nn.Module) -> dict[int, Group]:
    groups = {}
    with _uninstalled(module):
        found = equal_modules(module)
    for blocks in found:
        if blocks[0] not in _numbers:
            _numbers[blocks[0]] = next(_next_number)
        groups[_numbers[blocks[0]]] = Group(blocks)
    return groups


@contextlib.contextmanager
def _uninstalled(module: nn.Module) -> Iterator[None]:
    """What `_install` gave to blocks is not there: by it no two of them are equal."""
    installed = [vars(block) for block in module.modules() if _PLACE in vars(block)]
    given = [(own.pop("forward"), own.pop(_PLACE)) for own in installed]
    try:
        yield
    finally:
        for own, (own_forward, place) in zip(installed, given, strict=True):
            own["forward"], own[_PLACE] = own_forward, place


def _install(groups: Mapping[int, Group]) -> None:
    """Gives blocks the `forward` that may be an op. A copy of a block gets one of its own from
    `copy.deepcopy`; from a pickle comes what its class has.
    """
    for number, group in groups.items():
        for index, block in enumerate(group.blocks):
            place = number, index
            if vars(block).get(_PLACE) != place:
                block.forward = types.MethodType(forward, block)
                block._fxsplit_place = place  # type: ignore[assignment]


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block: an op while it is traced for whoever takes it, else its own."""
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


def group_of(number: int) -> Group:
    """The group of this number, while its blocks are ops."""
    return _groups[number]


def _fake(
    tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str, group: int, index: int
) -> Tensor:
    like = _groups[group].result(tensors, numbers, structure)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


torch.library.register_fake("fxsplit::block", _fake, lib=_library)
