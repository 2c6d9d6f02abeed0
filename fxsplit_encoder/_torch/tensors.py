"""Tensors and modules from inside: versions, storages, and the dictionaries that hold parameters."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "INTERNALS",
    "StorageWeakRef",
    "hooks_of",
    "is_dropped",
    "storage_id",
    "tensors_of",
    "version_of",
    "weakly",
]

version_of = attrgetter("_version")
"""How often a tensor was written in place. An inference tensor raises RuntimeError when asked. No public API
tells that a parameter got other weights at the same address.
"""

_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
INTERNALS = frozenset({*_HOOKS, "_parameters", "_buffers", "_modules"})
"""Attributes in which a module keeps its tensors, submodules and hooks."""


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The hooks that a module calls around its forward and backward, which no public API lists."""
    return (hook for kind in _HOOKS for hook in (getattr(module, kind, None) or {}).values())


def tensors_of(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None]]:
    """The dictionaries in which a module itself holds its parameters and its buffers, those that are None
    included. Public methods yield copies of what they hold: a look-up at every call is too slow by them, and
    a tensor that is replaced would not be seen.
    """
    return module._parameters, module._buffers


def storage_id(tensor: Tensor) -> int:
    """What tensors over one storage share, fake ones too, which have no address."""
    found: int = tensor.untyped_storage()._cdata
    return found


def weakly(tensor: Tensor) -> StorageWeakRef:
    """The memory behind a tensor and all its views, without keeping it; weak references to the tensor itself
    end while views of it live.
    """
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_dropped(memory: StorageWeakRef) -> bool:
    """Whether no tensor refers to the memory any more."""
    return bool(memory.expired())  # type: ignore[no-untyped-call]
