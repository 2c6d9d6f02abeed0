"""What the processes of the tensor-parallel tests run, over gloo on a CPU and NCCL on GPUs."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxsplit_encoder as fx
from fxsplit_encoder.errors import CaptureError

from .rank_processes import start_ranks

REFUSED = "this rank has no room"


def run_ranks(num_ranks: int, backend: str, folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Encodes `job["batches"]` by a sharded `job["tower"]` in so many processes, once in each of
    `job["runs"]`; what each rank reports of each run.
    """
    torch.save(job, folder / "job.pt")
    start_ranks(_rank, num_ranks, backend, num_ranks, backend, folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def shard(tower: Any, device_type: str, num_ranks: int) -> None:
    """Splits the MLP of every block: the first layer by columns, the second by rows, with an all-reduce."""
    mesh = init_device_mesh(device_type, (num_ranks,))
    for block in tower.blocks:
        parallelize_module(
            block.mlp, mesh, {"linear_fc1": ColwiseParallel(), "linear_fc2": RowwiseParallel()}
        )


def _rank(rank: int, num_ranks: int, backend: str, folder: Path) -> None:
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
    job = torch.load(folder / "job.pt", weights_only=False)
    torch.save(_encode(rank, num_ranks, device, job), folder / f"rank{rank}.pt")
    dist.barrier()
    os._exit(0)


def _encode(rank: int, num_ranks: int, device: torch.device, job: dict[str, Any]) -> dict[str, Any]:
    tower = job["tower"].to(device)
    whole = fx.wrap(copy.deepcopy(tower))
    shard(tower, device.type, num_ranks)
    sharded, results, program = fx.wrap(tower), {}, None
    for name, run in job["runs"].items():
        config = fx.EncoderConfig(mode=run["mode"], exact_min_hits=2, packing="greedy", **job["limits"])
        manager = fx.EncoderCudaGraphManager(sharded, config, log_interval=0)
        path = manager.paths["default"]
        if program is not None:  # traced once, for all runs
            path.forward.bind(program)
        if rank == run.get("refusing_rank"):
            _refuse(path, run["refused_tokens"])
        manager.capture()
        program = path.program
        results[name] = _report(manager, whole, job["batches"])
    return results


def _report(manager: fx.EncoderCudaGraphManager, whole: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    path = manager.paths["default"]
    errors = []
    for batch in batches:
        inputs = dict(batch, pixel_values=batch["pixel_values"].to(whole.device, whole.dtype))
        with torch.no_grad():
            expected = whole.encoder_eager_forward(inputs)
        output = torch.cat(manager.execute(inputs))
        scale = expected.float().abs().max()
        errors.append(float((output.float() - expected.float()).abs().max() / scale))
    return {
        "errors": errors,
        "hits": manager.stats().hits,
        "misses": dict(manager.stats().misses),
        "sizes": path.unpadded.captures.sizes if path.recurring_counts else sorted(path.captured),
        "refused": path.unpadded.captures.refused if path.recurring_counts else {},
        "reports": manager.reports,
    }


def _refuse(path: Any, tokens: int) -> None:
    """Makes the capture of one size fail, as it does where memory runs out on this rank alone."""
    assert path.recurring_counts is not None
    request = path.unpadded.captures._request

    def refusing(size: int) -> Any:
        if size == tokens:
            raise CaptureError(REFUSED)
        return request(size)

    path.unpadded.captures._request = refusing
