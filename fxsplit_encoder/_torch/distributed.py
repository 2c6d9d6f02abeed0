"""What ranks share: shards, results of collectives that may come later, and how long a group waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: of a `DTensor` its shard, of the result of a collective its value.
    Such tensors have no address of their own.

    The public `DTensor.to_local` makes a new tensor at each call; every replay asks for the address of each
    parameter.
    """
    inner = getattr(tensor, "_local_tensor", None)
    if inner is None:
        inner = getattr(tensor, "elem", None)
    return inner if isinstance(inner, torch.Tensor) else tensor


def is_collective(op: Any) -> bool:
    """Whether an operator is a functional collective, whose result may come after the call."""
    return getattr(op, "namespace", None) == "_c10d_functional"


def wait_for(tensor: Tensor) -> None:
    """Waits for the result of a collective. Public ones wait by themselves, but traced graphs hold these."""
    torch.ops._c10d_functional.wait_tensor(tensor)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long ranks of a group wait for one another, which is set in public and cannot be asked for."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
