"""What tells the captures of one module apart: everything about a call's arguments that a graph bakes in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from fxsplit_encoder.errors import InputError

# Host code may branch on every value of a tensor on the host. Longer ones are data, and belong on the device.
_MOST_HOST_VALUES = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call."""

    leaves: list[Any]
    structure: TreeSpec
    descriptor: Hashable
    """Equal for calls that one capture serves: of a tensor on the device shape, strides and dtype, of one on
    the host its values too, and everything else itself."""


def describe(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Batch:
    """The batch of a call to a module on `device`.

    Raises:
        InputError: an argument that is neither a tensor nor hashable, or a long tensor on the host.
    """
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    return Batch(leaves, structure, (structure, *(_describe(leaf, device) for leaf in leaves)))


def _describe(leaf: Any, device: torch.device) -> Hashable:
    if not isinstance(leaf, torch.Tensor):
        try:
            hash(leaf)
        except TypeError as error:
            raise InputError(
                f"an argument of type {type(leaf).__name__} is not hashable, so no capture can be found by "
                "it; pass tensors, numbers, strings, or lists, tuples and dicts of them"
            ) from error
        return type(leaf), leaf  # 1, 1.0 and True are equal
    layout = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    if leaf.device.type == device.type:
        return layout
    if leaf.numel() > _MOST_HOST_VALUES:
        raise InputError(
            f"a tensor of shape {tuple(leaf.shape)} on {leaf.device} for a module on {device} has more than "
            f"{_MOST_HOST_VALUES} values, which would all be part of its capture; move it to {device}"
        )
    # As bytes, since a NaN would equal no other.
    values = leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
    return (*layout, values)
