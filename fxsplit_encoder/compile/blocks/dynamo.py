"""Equal blocks as ops in a trace that is not ours: that of torch.compile, for a backend of ours."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxsplit_encoder._torch.dynamo import backends_in_use, current_compile_id
from fxsplit_encoder.compile.blocks.op import end_ops, make_ops


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
