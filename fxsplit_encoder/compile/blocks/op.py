"""The op that stands for a block while a forward is traced: by us (`equal_blocks_as_ops`), or by
torch.compile for a backend of ours (`begin_blocks`).
"""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.dynamo import backends_in_use, current_compile_id
from fxsplit_encoder._torch.modules import PLACE
from fxsplit_encoder.compile.blocks.group import Group, Number, equal_modules, take_apart
from fxsplit_encoder.errors import CompileError

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("block(Tensor[] tensors, SymInt[] numbers, str structure, int group, int index) -> Tensor")
"""`structure` says how the tensors and numbers are the arguments of the group's block of this index."""
block_op = torch.ops.fxsplit.block.default

_groups: dict[int, Group] = {}
"""Those whose blocks are ops now."""

_numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""The number of each group, by its first block: Dynamo's guards see it, so it stays."""
_next_number = itertools.count()


@contextlib.contextmanager
def equal_blocks_as_ops(module: nn.Module) -> Iterator[int]:
    """Makes the equal blocks of a module ops, for as long as the context lasts; yields how many blocks."""
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
    """Makes the blocks of these groups what they were, but for a `forward` that calls their own."""
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
    """What `_install` gave to blocks is not there: by it no two of them are equal."""
    installed = [vars(block) for block in module.modules() if PLACE in vars(block)]
    given = [(own.pop("forward"), own.pop(PLACE)) for own in installed]
    try:
        yield
    finally:
        for own, (own_forward, place) in zip(installed, given, strict=True):
            own["forward"], own[PLACE] = own_forward, place


def _install(groups: Mapping[int, Group]) -> None:
    """Gives blocks the `forward` that may be an op. A copy of a block gets one of its own from
    `copy.deepcopy`; from a pickle comes what its class has.
    """
    for number, group in groups.items():
        for index, block in enumerate(group.blocks):
            place = number, index
            own = vars(block)
            if own.get(PLACE) != place or getattr(own.get("forward"), "__func__", None) is not forward:
                block.forward = types.MethodType(forward, block)
                block._fxsplit_place = place  # type: ignore[assignment]


def _release_others(module: nn.Module, groups: Mapping[int, Group]) -> None:
    """Gives blocks that were equal to others, and are no longer, their own `forward` back: their old places
    are other blocks' now.
    """
    members = {block for group in groups.values() for block in group.blocks}
    for block in module.modules():
        if PLACE in vars(block) and block not in members:
            del block.forward, block._fxsplit_place


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


def takes_blocks(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a backend of torch.compile that puts the graphs of blocks in the places of their ops, and calls
    `end_blocks` when it is done.
    """
    backend._fxsplit_takes_blocks = True  # type: ignore[attr-defined]
    return backend


def begin_blocks(module: nn.Module) -> bool:
    """Makes the equal blocks of a module ops until `end_blocks`, if Dynamo traces it now for a backend that
    takes them. Called during a trace, from a frame that Dynamo does not trace. Returns whether they are.

    Not with gradients or under autocast, of which the trace of a block knows nothing. The blocks keep a
    `forward` of ours from then on, since Dynamo's guards check it at every call; it calls their own.
    """
    compilation = current_compile_id()
    if _open.compilation != compilation:  # of a trace that failed before its backend was called
        end_blocks()
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if torch.is_grad_enabled() or autocast or module in _refused or not _is_taken():
        return False
    if module not in _open.modules:
        _open.modules.append(module)
        _open.groups += make_ops(module)
        _open.compilation = compilation
    return True


def end_blocks(*, refused: bool = False) -> bool:
    """Lets no block that `begin_blocks` made an op be one any more; returns whether any was.

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
    """What was begun. Dynamo traces one frame at a time in a process."""

    def __init__(self) -> None:
        self.compilation: Any = None
        self.modules: list[nn.Module] = []
        self.groups: list[int] = []


_open = _Open()
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _is_taken() -> bool:
    """Whether the trace under way is for a backend that `takes_blocks` marked."""
    return any(getattr(backend, "_fxsplit_takes_blocks", False) for backend in backends_in_use())
