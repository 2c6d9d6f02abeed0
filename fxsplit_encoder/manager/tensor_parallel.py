"""Towers whose parameters are sharded among ranks by `torch.distributed.tensor.parallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fxsplit_encoder.manager.tower_part import tower_part


def agreement_of(tower: object) -> Callable[[bool], bool] | None:
    """Whether every rank of a sharded tower says yes, as a call that all of them must make; None: nothing of
    it is sharded.

    The forward of a sharded tower has collectives, so its ranks must run and capture the same things in the
    same order. Given the same requests they do, but for what a rank finds out alone: how long something
    takes, and whether memory is left.
    """
    meshes = _meshes(tower)
    if not meshes:
        return None

    def agree(ready: bool) -> bool:
        for mesh in meshes:
            for group in mesh.get_all_groups():
                vote = torch.tensor([int(ready)], device=mesh.device_type)
                dist.all_reduce(vote, dist.ReduceOp.MIN, group)
                ready = bool(vote.item())
        return ready

    return agree


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
