"""Ops that read what a device computes on the host, so that no graph holds them.

CUDA refuses them too, but after it has invalidated the capture; here they are refused before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxsplit_encoder.errors import CaptureError

_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)
_MASKS = (torch.bool, torch.uint8)


def refuse_synchronisation(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> None:
    """Raises CaptureError if the op, called with these arguments, would wait for `device`."""
    if op in _COPIES:
        reason = _waiting_copy(args, kwargs, device)
    elif _on_device(args, kwargs, device) and _depends_on_values(op, args, kwargs):
        reason = "the host needs values that the device computes"
    else:
        return
    if reason is not None:
        raise CaptureError(f"{op.name()} cannot be captured: {reason}")


def _depends_on_values(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if op in _INDEXING:  # by numbers it does not; a single value of the host is written through a mask
        masks = any(index is not None and index.dtype in _MASKS for index in args[1])
        return masks and (
            op is torch.ops.aten.index.Tensor or args[2].numel() != 1 or args[2].device.type != "cpu"
        )
    if op is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return any(tag in _READS_VALUES for tag in getattr(op, "tags", ()))


def _on_device(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> bool:
    leaves = tree_leaves((args, kwargs))
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == device.type for leaf in leaves)


def _waiting_copy(args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> str | None:
    if "device" in kwargs or len(args) == 1:  # aten::_to_copy(source, *, device, non_blocking)
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        non_blocking = kwargs.get("non_blocking", False)
    else:  # aten::copy_(target, source, non_blocking)
        target, source = args[0].device, args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if source.device.type == target.type or device.type not in (source.device.type, target.type):
        return None
    if not non_blocking:
        return f"a copy from {source.device.type} to {target.type} waits for the device"
    if source.device.type == "cpu" and not source.is_pinned():
        return "a copy from memory of the host that is not pinned waits for the device"
    return None
