"""Towers by name, by which what is called amid a trace finds them, and their equal blocks there."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.compile.blocks import begin_blocks

if TYPE_CHECKING:
    from fxsplit_encoder.towers.base import WrappedTower

_towers: weakref.WeakValueDictionary[str, WrappedTower] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_tower(tower: WrappedTower) -> str:
    """Makes a tower known; returns the name under which it is found."""
    name = f"{type(tower).__name__}_{next(_numbers)}"
    _towers[name] = tower
    return name


def registered_tower(name: str) -> Any:
    """The tower of that name."""
    return _towers[name]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def trace_equal_blocks_once(tower_name: str) -> bool:
    """Makes the equal blocks of a tower ops of the trace that Dynamo makes now, which calls this and does not
    trace it. Returns whether they are.
    """
    return begin_blocks(registered_tower(tower_name).tower)
