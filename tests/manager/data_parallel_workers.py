"""What the processes of the data-parallel tests run, over gloo on a CPU and NCCL on GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.manager.data_parallel import DataParallel
from fxsplit_encoder.protocol import EncoderItemSpec

from ..small_tower import wrapped
from .rank_processes import join, result_of, start_ranks

LIMITS = {
    "token_budgets": (4, 16, 32, 64),
    "max_items_per_batch": 4,
    "max_frames_per_batch": 8,
    "piece_compiler": "eager",
}
CPU = torch.device("cpu")
SHORT = timedelta(seconds=5)
FAILING_RANK = 1
ROWS = (1, 5, 2, 3, 2)


class FakeTower:
    """Items of declared sizes, (patches, tokens) each; a request is a list of them."""

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(*size) for size in mm_kwargs["items"]]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        return {"items": [mm_kwargs["items"][i] for i in indices]}


def run_ranks(
    num_ranks: int, folder: Path, job: dict[str, Any], backend: str = "gloo"
) -> list[dict[str, Any]]:
    """Runs the parts that `job` names in `num_ranks` processes; what each has to say of those it finished."""
    torch.save(job, folder / "job.pt")
    return start_ranks(_rank, num_ranks, backend, folder)


def _rank(rank: int, num_ranks: int, backend: str, folder: Path) -> None:
    device = join(rank, num_ranks, backend, folder)
    job = torch.load(folder / "job.pt", map_location=device, weights_only=False)
    results: dict[str, Any] = {}
    for name, part in PARTS.items():
        if name in job:
            results |= part(rank, num_ranks, job[name])
            torch.save(results, result_of(folder, rank))  # now: in the next part this rank may die
    # Without the group's destructor: it would wait for ranks that are gone.
    os._exit(0)


def _attempt(call: Any) -> Any:
    """What a call returns, or (type, message) of what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def _requests(rank: int, num_ranks: int, job: dict[str, Any]) -> dict[str, Any]:
    """Every request in each mode."""
    tower = wrapped(job["tower"])
    results: dict[str, Any] = {}
    program = None
    for mode in job["modes"]:
        config = fx.EncoderConfig(**LIMITS, mode=mode, data_parallel=True)
        manager = fx.EncoderCudaGraphManager(tower, config, log_interval=0)
        path = manager.paths["default"]
        if program is not None:  # traced once, for all modes
            path.bind(program)
        manager.capture()
        program = path.program
        for name, inputs in job["inputs"].items():
            results[mode, name] = manager.execute(inputs)
        results[mode, "stats"] = manager.stats()
    return results


def _faults(rank: int, num_ranks: int, job: dict[str, Any]) -> dict[str, Any]:
    """Requests that go wrong on some ranks or on all, each followed by one that must succeed."""
    config = fx.EncoderConfig(**LIMITS, mode="none", data_parallel=True)
    manager = fx.EncoderCudaGraphManager(wrapped(job["tower"]), config, log_interval=0)
    good = job["good"]
    malformed = {**good, "pixel_values": good["pixel_values"][1:]}
    results: dict[str, Any] = {}

    def attempt(name: str, inputs: dict[str, Any]) -> None:
        results[name] = _attempt(lambda: manager.execute(inputs))
        results[f"after {name}"] = manager.execute(good)

    attempt("malformed on all", malformed)
    attempt("malformed on one", malformed if rank == FAILING_RANK else good)
    attempt("no sizes on one", {"image_grid_thw": [[1, 3, 3]]} if rank == FAILING_RANK else good)
    attempt("other items on one", job["other"] if rank == FAILING_RANK else good)
    return results


def _fake_towers(rank: int, num_ranks: int, job: dict[str, Any]) -> dict[str, Any]:
    """Local encoders that a real tower would not be."""
    results: dict[str, Any] = {}

    def attempt(name: str, sizes: Any, make: Any, measured: Any = None, costs: Any = None) -> None:
        parallel = DataParallel(None, CPU)
        parallel.costs = costs or parallel.costs
        if measured is not None:
            parallel.share_costs(*measured)
        calls = []

        def encode(mm_kwargs: dict[str, Any]) -> list[Tensor]:
            calls.append(mm_kwargs["items"])
            return [make(size) for size in mm_kwargs["items"]]

        results[name] = _attempt(lambda: parallel.execute({"items": sizes}, encode, FakeTower()))
        results[f"{name}: given"] = calls

    def real(extra: int, dtype: torch.dtype = torch.float32) -> Any:
        """`extra` rows more than declared, full of the item's patches."""
        return lambda size: torch.full((size[1] + extra, 3), size[0], dtype=dtype)

    sizes = [(4 * n, n) for n in ROWS]
    for extra in (-1, 2):
        attempt(f"{extra} rows more", sizes, real(extra))
    attempt("more rows on one", sizes, real(rank == FAILING_RANK))
    attempt("only item of other rows", [(7, 2)], real(3))
    attempt("no rows", [(4, 0), (4, 0), (4, 0)], real(0))
    attempt("bfloat16", sizes, real(1, torch.bfloat16))
    attempt("int32", sizes, real(0, torch.int32))
    attempt("other dtype on one", sizes, real(0, torch.float64 if rank == FAILING_RANK else torch.float32))
    attempt("three dimensions", sizes, lambda size: torch.zeros(size[1], 3, 1))
    widths = iter((1, 2))
    attempt("two widths", [(1, 1)] * 2 * num_ranks, lambda size: torch.zeros(1, next(widths)))
    costs = {4: 1.0, 20: 1.0, 8: 1.0, 12: 100.0}
    attempt("by cost", sizes, real(0), costs=lambda spec: costs[spec.input_size])
    attempt("rank 0's costs", sizes, real(0), measured=(1.0, 100.0 if rank == 0 else 0.0))
    attempt("costs of its own", sizes, real(0), costs=lambda spec: spec.input_size ** (1 - rank))
    return results


def _invariant(rank: int, num_ranks: int, job: dict[str, Any]) -> dict[str, Any]:
    """A request whose items get the same bits on every rank, and ranks that chose other kernels."""
    config = fx.EncoderConfig(**LIMITS, mode="full", data_parallel=True, invariant=True)
    manager = fx.EncoderCudaGraphManager(wrapped(job["tower"]), config, log_interval=0)
    manager.capture()
    parallel = manager.data_parallel
    assert parallel is not None
    kernel = "another" if rank == FAILING_RANK else "one"
    return {
        "invariant": manager.execute(job["inputs"]),
        "invariant: same": _attempt(lambda: parallel.check_same("kernels", ["one"])),
        "invariant: others": _attempt(lambda: parallel.check_same("kernels", [kernel])),
    }


def _lost_ranks(rank: int, num_ranks: int, job: dict[str, Any]) -> dict[str, Any]:
    """A rank that does not call, then one that dies. A group each: after either, it is of no more use.

    A rank that does not call waits for the others in the default group: they must give up long before that
    group does.
    """
    late_group, dying_group = (dist.new_group(timeout=SHORT) for _ in range(2))
    config = fx.EncoderConfig(**LIMITS, mode="none", data_parallel=True)
    tower = wrapped(job["tower"])
    good = job["good"]
    late, dying = (
        fx.EncoderCudaGraphManager(tower, config, log_interval=0, process_group=group)
        for group in (late_group, dying_group)
    )
    dist.barrier()  # so that none is late for the short timeout
    assert len(late.execute(good)) == len(dying.execute(good)) == job["num_items"]
    results: dict[str, Any] = {}
    dist.barrier()
    if rank != FAILING_RANK:
        results["late"] = _attempt(lambda: late.execute(good))
    dist.barrier()
    if rank == FAILING_RANK:
        os._exit(0)
    results["dead"] = _attempt(lambda: dying.execute(good))
    return results


PARTS = {
    "requests": _requests,
    "faults": _faults,
    "fake towers": _fake_towers,
    "invariant": _invariant,
    "lost ranks": _lost_ranks,
}
