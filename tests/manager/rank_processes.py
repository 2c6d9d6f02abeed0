"""The processes of a process group, started without an import of torch each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def start_ranks(run: Callable[..., None], num_ranks: int, backend: str, *arguments: Any) -> None:
    """`run(rank, *arguments)` in a process of each rank, until all have ended.

    Under gloo the processes are forked from a server that has imported `run`'s module, which takes longer
    than what most ranks do; under NCCL they are plain ones, as CUDA does not outlive a fork.
    """
    method = "spawn"
    if backend == "gloo":
        method = "forkserver"
        multiprocessing.set_forkserver_preload([run.__module__])
    mp.start_processes(run, args=arguments, nprocs=num_ranks, start_method=method)
