"""Towers whose weights ranks share, by `torch.distributed.tensor.parallel` or by layers of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fxsplit_encoder.manager.tower_part import tower_part


def agreement_of(
    tower: object, process_group: dist.ProcessGroup | None = None
) -> Callable[[bool], bool] | None:
    """Whether every rank that shares a tower's weights says yes, as a call that all of them must make; None:
    nobody else has any of them.

    The forward of such a tower has collectives, so its ranks must run and capture the same things in the same
    order. Given the same requests they do, but for what a rank finds out alone: how long something takes, and
    whether memory is left.

    Args:
        process_group: the ranks, of a tower that does not tell: its own code calls the collectives.
    """
    groups = [(group, mesh.device_type) for mesh in _meshes(tower) for group in mesh.get_all_groups()]
    if process_group is not None and dist.get_world_size(process_group) > 1:
        groups.append((process_group, _device_type(process_group)))
    if not groups:
        return None

    def agree(ready: bool) -> bool:
        for group, device in groups:
            vote = torch.tensor([int(ready)], device=device)
            dist.all_reduce(vote, dist.ReduceOp.MIN, group)
            ready = bool(vote.item())
        return ready

    return agree


def why_not_compiled(tower: object) -> str:
    """Why a tower with an agreement is captured as it is."""
    if _meshes(tower):
        return "captured without compiling: its parameters are sharded among ranks (DTensor)"
    return "captured without compiling: its weights are shared among the ranks of process_group"


def _device_type(group: dist.ProcessGroup) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _meshes(tower: object) -> list[Any]:
    part = tower_part(tower)
    if part is None or not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor

    meshes: list[Any] = []
    for parameter in part.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh not in meshes:
            meshes.append(parameter.device_mesh)
    return meshes
