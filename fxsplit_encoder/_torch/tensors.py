"""Tensors and modules from inside: versions, storages, and the dictionaries that hold parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as as_plain_tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import is_parametrized

__all__ = [
    "INTERNALS",
    "FakeTensorMode",
    "StorageWeakRef",
    "as_plain_tensors",
    "children_of",
    "copy_each",
    "dense_parts",
    "forward_hooks_of",
    "hooks_of",
    "is_dropped",
    "linked_copy",
    "share_names",
    "storage_id",
    "tensors_of",
    "version_of",
    "weakly",
    "wrapped",
]

version_of = attrgetter("_version")
"""How often a tensor was written in place. An inference tensor raises RuntimeError when asked. No public API
tells that a parameter got other weights at the same address.
"""


def wrapped(tensor: object) -> Sequence[str] | None:
    """The attributes in which a tensor of a wrapper subclass (`DTensor`, torchao's quantized weights) has the
    tensors that hold its values: it has no memory of its own. None for what is no such tensor.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    # A DTensor names its mesh, too.
    return [name for name in flatten()[0] if isinstance(getattr(tensor, name), Tensor)]


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a tensor's values: those inside of a wrapper subclass, in order, else itself."""
    names = wrapped(tensor)
    if names is None:
        return [tensor]
    return [part for name in names for part in dense_parts(getattr(tensor, name))]


_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
INTERNALS = frozenset({*_HOOKS, "_parameters", "_buffers", "_modules"})
"""Attributes in which a module keeps its tensors, submodules and hooks."""


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The hooks that a module calls around its forward and backward, which no public API lists."""
    return (hook for kind in _HOOKS for hook in (getattr(module, kind, None) or {}).values())


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The dictionaries in which a module holds the hooks that it calls before and after its forward: asking
    at every call whether there are others than before is too slow by anything else.
    """
    return module._forward_pre_hooks, module._forward_hooks


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary in which a module holds its submodules, for the same reason."""
    return module._modules


def tensors_of(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None]]:
    """The dictionaries in which a module itself holds its parameters and its buffers, those that are None
    included. Public methods yield copies of what they hold: a look-up at every call is too slow by them, and
    a tensor that is replaced would not be seen.
    """
    return module._parameters, module._buffers


_NAMED = (
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def share_names(module: nn.Module, owner: nn.Module) -> None:
    """Lets a module have the parameters, buffers and submodules of another as its own, under the same names:
    what is replaced in one of them is replaced in both. No public API puts a module in another's place
    without a prefix before its names.
    """
    for name in _NAMED:
        module.__dict__[name] = owner.__dict__[name]


def linked_copy(module: nn.Module) -> nn.Module:
    """A copy of a tree of modules that holds its parameters and buffers where the tree itself does: one that
    is replaced or moved there is another here. Everything else, as submodules, attributes and hooks, is the
    copy's own; a `forward` that a module got for itself is left out.
    """
    return _linked(module, {})


def traced_copy(module: nn.Module) -> nn.Module:
    """A linked copy whose modules hold the same parameters in dictionaries of their own: a trace puts fake
    tensors there for a while, which whoever runs the tree meanwhile must not see.
    """
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
    """Writes each tensor to another of its shape: of five on a device in two thirds of the time that as many
    `copy_` keep the CPU of an H100's host, since that is one launch for those of a dtype.
    """
    if tensors:
        torch._foreach_copy_(copies, tensors)


def storage_id(tensor: Tensor) -> int:
    """What tensors over one storage share, fake ones too, which have no address."""
    found: int = tensor.untyped_storage()._cdata
    return found


def weakly(tensor: Tensor) -> StorageWeakRef:
    """The memory behind a tensor and all its views, not kept; views outlive references to the tensor."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_dropped(memory: StorageWeakRef) -> bool:
    """Whether no tensor refers to the memory any more."""
    return bool(memory.expired())  # type: ignore[no-untyped-call]
