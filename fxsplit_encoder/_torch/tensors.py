"""Internals of tensors and modules: versions, storages, and the dictionaries that hold parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as as_plain_tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import is_parametrized

from fxsplit_encoder._torch.peft import copies_of_values, is_adapter_layer

__all__ = ["FakeTensorMode", "StorageWeakRef", "as_plain_tensors"]

version_of = attrgetter("_version")
"""Returns how often a tensor was written in place; an inference tensor raises RuntimeError."""


# Of a torch that is built with CUDA.
_are_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def lie_at(tensors: list[Tensor], addresses: list[int]) -> bool:
    """Compares the addresses of tensors with as many others, in C++ where torch can."""
    if len(tensors) != len(addresses):
        return False
    if _are_at is None:
        return all(map(eq, map(Tensor.data_ptr, tensors), addresses))
    return _are_at(tensors, addresses, _first_indices(len(tensors)))  # type: ignore[no-any-return]


@functools.cache
def _first_indices(count: int) -> list[int]:
    return list(range(count))


def wrapped(tensor: object) -> Sequence[str] | None:
    """Returns the attributes with the inner tensors of a wrapper subclass (`DTensor`, torchao's), or None."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    # A DTensor names its mesh, too.
    return [name for name in flatten()[0] if isinstance(getattr(tensor, name), Tensor)]


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold a tensor's values: those inside of a wrapper subclass, else itself."""
    names = wrapped(tensor)
    if names is None:
        return [tensor]
    return [part for name in names for part in dense_parts(getattr(tensor, name))]


_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
INTERNALS = frozenset({*_HOOKS, "_parameters", "_buffers", "_modules"})
"""Attributes in which a module keeps its tensors, submodules and hooks."""


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Returns the hooks that a module calls around its forward and backward, which no public API lists."""
    return (hook for kind in _HOOKS for hook in (getattr(module, kind, None) or {}).values())


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns a module's dictionaries of hooks before and after its forward."""
    return module._forward_pre_hooks, module._forward_hooks


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the dictionary of a module's submodules."""
    return module._modules


def tensors_of(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None]]:
    """Returns the dictionaries of a module's own parameters and buffers, which follow replaced tensors."""
    return module._parameters, module._buffers


_NAMED = (
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def share_names(module: nn.Module, owner: nn.Module) -> None:
    """Gives a module the dictionaries of parameters, buffers and submodules of another."""
    for name in _NAMED:
        module.__dict__[name] = owner.__dict__[name]


def linked_copy(module: nn.Module) -> nn.Module:
    """Copies a tree of modules, without own `forward`s, that shares its dictionaries of tensors."""
    return _linked(module, {})


def traced_copy(module: nn.Module) -> nn.Module:
    """Returns a linked copy with dictionaries of its own, where a trace may put fake tensors unseen."""
    twin = linked_copy(module)
    for submodule in twin.modules():
        own = vars(submodule)
        for name in ("_parameters", "_buffers"):
            own[name] = own[name].copy()
    return twin


def _linked(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in known:
        twin = known[module] = _copy_of(module)
        own = vars(twin)
        own.pop("forward", None)
        if is_adapter_layer(module):
            own.update(copies_of_values(module))
        for name in _HOOKS:
            own[name] = copy.copy(own[name])
        own["_modules"] = {
            name: None if child is None else _linked(child, known) for name, child in own["_modules"].items()
        }
        for name, value in own.items():
            if name not in INTERNALS and isinstance(value, nn.Module):
                own[name] = _linked(value, known)
    return known[module]


def _copy_of(module: nn.Module) -> nn.Module:
    if not is_parametrized(module):
        return copy.copy(module)
    twin: nn.Module = type(module).__new__(type(module))  # `copy.copy` refuses these
    vars(twin).update(vars(module))
    return twin


def copy_each(copies: list[Tensor], tensors: list[Tensor]) -> None:
    """Writes each tensor to another of its shape, in one launch for those of a dtype."""
    if tensors:
        torch._foreach_copy_(copies, tensors)


def storage_id(tensor: Tensor) -> int:
    """Returns an id of a tensor's storage; fake ones have no address."""
    found: int = tensor.untyped_storage()._cdata
    return found


def weakly(tensor: Tensor) -> StorageWeakRef:
    """Returns a weak reference to the memory behind a tensor and its views."""
    return StorageWeakRef(tensor.untyped_storage())


def is_dropped(memory: StorageWeakRef) -> bool:
    """Whether no tensor refers to the memory any more."""
    return bool(memory.expired())
