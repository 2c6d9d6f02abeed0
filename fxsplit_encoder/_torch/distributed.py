"""Access shards, results of collectives, and the timeout of a process group."""

from __future__ import annotations

import functools
import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_COLLECTIVE = re.compile("all_?reduce|all_?gather|reduce_?scatter|all_?to_?all")


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a `DTensor`, without a new tensor, or a collective's value."""
    inner = getattr(tensor, "_local_tensor", None)
    if inner is None:
        inner = getattr(tensor, "elem", None)
    return inner if isinstance(inner, torch.Tensor) else tensor


def is_collective(op: Any) -> bool:
    """Whether an operator is one of torch's collectives, whose result may come after the call."""
    return getattr(op, "namespace", None) in ("_c10d_functional", "c10d")


@functools.cache
def calls_other_ranks(op: Any) -> bool:
    """Whether an operator is a collective of torch, or of another library by its name."""
    namespace = getattr(op, "namespace", "aten")
    return is_collective(op) or (namespace != "aten" and _COLLECTIVE.search(op.name()) is not None)


def wait_for(result: Any) -> None:
    """Waits for the result of a collective: a tensor of a functional one, or a handle next to the tensors."""
    if isinstance(result, torch.Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
        return
    for each in result if isinstance(result, list | tuple) else [result]:
        if isinstance(each, torch.ScriptObject):
            handle: Any = each
            handle.wait()


def num_ranks() -> int:
    """Returns the number of ranks; 1 where none was started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Returns how long ranks of a group wait for one another; public API only sets it."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
