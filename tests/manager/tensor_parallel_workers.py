"""What the processes of the tensor-parallel tests run, over gloo on a CPU and NCCL on GPUs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxsplit_encoder as fx
import fxsplit_encoder.kernels.attention  # the operators that the mock towers call
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.errors import CaptureError

from ..small_tower import wrapped
from .mock_towers import WIDTH, PackedModel, alone, batch
from .rank_processes import join, result_of, start_ranks

REFUSED = "this rank has no room"


def run_ranks(num_ranks: int, backend: str, folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Encodes `job["batches"]` by a sharded `job["tower"]` in so many processes, once in each of
    `job["runs"]`, and runs those of `PLAIN_RUNS` that `job["plain"]` names; what each rank reports of each.
    """
    torch.save(job, folder / "job.pt")
    return start_ranks(_rank, num_ranks, backend, folder)


def shard(tower: Any, device_type: str, num_ranks: int) -> None:
    """Splits the MLP of every block: the first layer by columns, the second by rows, with an all-reduce."""
    mesh = init_device_mesh(device_type, (num_ranks,))
    for block in tower.blocks:
        parallelize_module(
            block.mlp, mesh, {"linear_fc1": ColwiseParallel(), "linear_fc2": RowwiseParallel()}
        )


def _rank(rank: int, num_ranks: int, backend: str, folder: Path) -> None:
    job = torch.load(folder / "job.pt", weights_only=False)
    plain = job.get("plain", ())
    expected = [alone(ParallelPacked(), batch(*lengths)) for lengths in BATCHES]  # by the whole layer, as yet
    device = join(rank, num_ranks, backend, folder)
    results = _encode(num_ranks, device, job)
    results |= {name: _plain_report(PLAIN_RUNS[name](rank), expected) for name in plain}
    torch.save(results, result_of(folder, rank))
    dist.barrier()
    os._exit(0)


def _encode(num_ranks: int, device: torch.device, job: dict[str, Any]) -> dict[str, Any]:
    tower = job["tower"].to(device)
    whole = wrapped(copy.deepcopy(tower))
    shard(tower, device.type, num_ranks)
    sharded, results, program = wrapped(tower), {}, None
    for name, run in job["runs"].items():
        config = fx.EncoderConfig(mode=run["mode"], exact_min_hits=2, packing="greedy", **job["limits"])
        manager = fx.EncoderCudaGraphManager(sharded, config, log_interval=0)
        path = manager.paths["default"]
        if program is not None:  # traced once, for all runs
            path.bind(program)
        manager.capture()
        program = path.program
        results[name] = _report(manager, whole, job["batches"])
    return results


def _report(manager: fx.EncoderCudaGraphManager, whole: Any, batches: list[dict[str, Any]]) -> dict[str, Any]:
    path = manager.paths["default"]
    errors = []
    for each in batches:
        inputs = dict(each, pixel_values=each["pixel_values"].to(whole.device, whole.dtype))
        with torch.no_grad():
            expected = whole.encoder_eager_forward(inputs)
        output = torch.cat(manager.execute(inputs))
        scale = expected.float().abs().max()
        errors.append(float((output.float() - expected.float()).abs().max() / scale))
    return {
        "errors": errors,
        "hits": manager.stats().hits,
        "misses": dict(manager.stats().misses),
        "sizes": path.unpadded.sizes if path.recurring_counts else sorted(path.captured),
        "reports": manager.reports,
    }


# --- plain modules that call collectives, as an engine's own layers do

BUDGETS = (4, 8, 16)
BATCHES = ((3,), (2, 5), (4, 9), (1, 1, 1), (3,))
"""Lengths of items: the order in which they are packed, since an item's number in its batch counts."""


class RowParallelLinear(nn.Module):
    """Every rank multiplies by some columns of the weight, and the sum of all is the layer. Where there are
    no ranks it is the whole layer.
    """

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        if not dist.is_initialized():
            return self.whole(x)  # type: ignore[no-any-return]
        share = WIDTH // dist.get_world_size()
        own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        partial = x[:, own] @ self.whole.weight[:, own].t()
        dist.all_reduce(partial)
        return partial + self.whole.bias


class ParallelPacked(PackedModel):
    def __init__(self) -> None:
        super().__init__()
        self.linear: Any = RowParallelLinear(self.linear)


def _manager(*, told: bool = True, **settings: Any) -> fx.EncoderCudaGraphManager:
    config = fx.EncoderConfig(token_budgets=BUDGETS, max_items_per_batch=4, packing="greedy", **settings)
    group = dist.group.WORLD if told else None
    return fx.EncoderCudaGraphManager(ParallelPacked(), config, log_interval=0, process_group=group)


def _captured(**settings: Any) -> fx.EncoderCudaGraphManager:
    manager = _manager(**settings)
    manager.capture()
    return manager


def _without_inputs(rank: int) -> fx.EncoderCudaGraphManager:
    """Memory for the inputs of one budget runs out on one rank."""
    manager = _manager(mode="full")
    path = manager.paths["default"]
    request = path.request

    def refusing(tokens: int, shared: Any) -> Any:
        if rank == 1 and tokens == 8:
            raise CaptureError(REFUSED)
        return request(tokens, shared)

    path.request = refusing  # type: ignore[method-assign]
    manager.capture()
    return manager


def _without_one_graph(rank: int) -> fx.EncoderCudaGraphManager:
    """One graph of one budget fails on one rank, after its forward has run."""
    manager = _manager(mode="auto")
    path = manager.paths["default"]
    request, record = path.request, CapturedForward.record
    requested: list[int] = []

    def noted(tokens: int, shared: Any) -> Any:
        requested.append(tokens)
        return request(tokens, shared)

    def failing(captured: CapturedForward, warmups: int) -> None:
        record(captured, warmups)
        if rank == 1 and requested[-1] == 8 and captured.mode == "full":
            captured.release()
            raise CaptureError(REFUSED)

    path.request = noted  # type: ignore[method-assign]
    CapturedForward.record = failing  # type: ignore[method-assign]
    manager.capture()
    return manager


PLAIN_RUNS: dict[str, Callable[[int], fx.EncoderCudaGraphManager]] = {
    "plain": lambda rank: _captured(mode="full"),
    "without inputs": _without_inputs,
    "without one graph": _without_one_graph,
    "with less memory": lambda rank: _captured(mode="full", max_graph_bytes=1400 if rank == 1 else 2**30),
    "not told": lambda rank: _captured(told=False),
}


def _plain_report(manager: fx.EncoderCudaGraphManager, expected: list[list[Tensor]]) -> dict[str, Any]:
    errors = []
    for lengths, wanted in zip(BATCHES, expected, strict=True):
        output = manager.execute(batch(*lengths))
        errors += [float((got - each).abs().max()) for got, each in zip(output, wanted, strict=True)]
    return {
        "error": max(errors),
        "hits": manager.stats().hits,
        "modes": {b: graph.mode for b, graph in manager.budget_graphs["default"].items()},
        "reports": manager.reports,
    }
