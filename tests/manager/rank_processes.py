"""The processes of a process group, started without an import of torch each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def start_ranks(
    run: Callable[..., None], num_ranks: int, backend: str, folder: Path, *arguments: Any
) -> list[dict[str, Any]]:
    """`run(rank, num_ranks, backend, folder, *arguments)` in a process of each rank, until all have ended;
    what each has saved as `result_of(folder, rank)`.

    Under gloo the processes are forked from a server that has imported `run`'s module, which takes longer
    than what most ranks do; under NCCL they are plain ones, as CUDA does not outlive a fork.
    """
    method = "spawn"
    if backend == "gloo":
        method = "forkserver"
        multiprocessing.set_forkserver_preload([run.__module__])
    mp.start_processes(
        run, args=(num_ranks, backend, folder, *arguments), nprocs=num_ranks, start_method=method
    )
    results = [result_of(folder, rank) for rank in range(num_ranks)]
    return [torch.load(result, map_location="cpu", weights_only=False) for result in results]


def result_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def join(rank: int, num_ranks: int, backend: str, folder: Path) -> torch.device:
    """Joins the group of all ranks; the device of this one."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    return device
