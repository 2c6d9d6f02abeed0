"""Which modules of a model are equal: the same computation on parameters of the same layout.

Two modules are equal if their trees are: the same classes, parameters and buffers of the same layouts, and
attributes of the same values. What cannot be compared by value is compared by identity, so that doubt makes
modules unequal, which costs time but never a result.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fxsplit_encoder._torch.tensors import INTERNALS, hooks_of, tensors_of
from fxsplit_encoder._torch.transformers import collects_attention

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
