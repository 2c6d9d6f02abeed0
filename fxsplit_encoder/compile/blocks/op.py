"""The op that stands for a block while a forward is traced."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.compile.blocks.arguments import take_apart
from fxsplit_encoder.compile.blocks.group import Group
from fxsplit_encoder.compile.equal_modules import equal_modules
from fxsplit_encoder.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from fxsplit_encoder.compile.blocks.arguments import Number

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("block(Tensor[] tensors, SymInt[] numbers, str structure, int group, int index) -> Tensor")
"""`structure` says how the tensors and numbers are the arguments of the group's block of this index."""
block_op = torch.ops.fxsplit.block.default

_groups: dict[int, Group] = {}
_group_numbers = itertools.count()


@contextlib.contextmanager
def equal_blocks_as_ops(module: nn.Module) -> Iterator[int]:
    """Makes the equal blocks of a module ops, for as long as the context lasts; yields how many blocks."""
    groups = {next(_group_numbers): Group(blocks) for blocks in equal_modules(module)}
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


def group_of(number: int) -> Group:
    """The group of this number, while its blocks are ops."""
    return _groups[number]


def _stub(block: nn.Module, group: int, index: int) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # another thread runs the module meanwhile
            return type(block).forward(block, *args, **kwargs)
        tensors: list[Tensor] = []
        numbers: list[int] = []
        structure = take_apart((args, kwargs), tensors, numbers)
        if torch.is_autocast_enabled(tensors[0].device.type):  # below the op nothing tells
            raise CompileError("a block runs under autocast, which its own trace would not")
        return block_op(tensors, numbers, structure, group, index)

    return forward


def _fake(
    tensors: Sequence[Tensor], numbers: Sequence[Number], structure: str, group: int, index: int
) -> Tensor:
    like = _groups[group].result(tensors, numbers, structure)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


torch.library.register_fake("fxsplit::block", _fake, lib=_library)
