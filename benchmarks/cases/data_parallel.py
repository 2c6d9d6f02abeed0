"""Twenty images through the Qwen3-VL-8B vision tower on one GPU, and shared among several.

    python benchmarks/bench.py data_parallel --ranks 1 2 4 --output out/data_parallel.json

27 blocks, 1152 wide, bf16, seeded random weights, mode `auto`. Each image has 336 x 336 pixels, which the
model's processor rounds to 320 x 320: 400 patches, 100 output tokens. Times are milliseconds of wall time of
`manager.execute` on rank 0, until it has all items and its GPU is idle. "error" is the relative root mean
square of the difference of rank 0's items from those of the run with one rank, which comes first.

`--tiny` runs a small tower on the CPU, over gloo: it shows that the script works, and no speed-up.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import captured, tiny_tower
from storage import Record
from timing import summarize, timed
from worker import relative_error

import fxsplit_encoder as fx
from fxsplit_encoder.models.random import demo_tower, random_inputs

PIXELS, PATCHES = 336, 400
LIMITS = {"token_budgets": (128, 256, 512, 1024, 2048), "max_items_per_batch": 32, "max_frames_per_batch": 0}
WARMUP = 5


def run_rank(rank: int, num_ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    """What one process does; rank 0 writes times and items into `folder`."""
    device = torch.device("cpu") if arguments.tiny else torch.device("cuda", rank)
    if arguments.tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if arguments.tiny else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        device_id=None if arguments.tiny else device,
    )
    # The same weights and patches on every rank.
    tower = fx.wrap(tiny_tower() if arguments.tiny else demo_tower(27, device, torch.bfloat16))
    manager = captured(tower, **LIMITS, data_parallel=True)
    inputs = random_inputs(tower, [PATCHES] * arguments.images)
    times = []
    items: list[torch.Tensor] = []

    def encode() -> None:
        items[:] = manager.execute(inputs)

    for _ in range(WARMUP + arguments.repeats):
        dist.barrier()
        times.append(timed(encode)[0])
    if rank == 0:
        measured = {"times": times[WARMUP:], "items": torch.cat(items).cpu()}
        torch.save(measured, f"{folder}/rank0.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(num_ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not there on every host
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(num_ranks, folder, arguments), nprocs=num_ranks)
        measured: dict[str, Any] = torch.load(f"{folder}/rank0.pt")
    return measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of GPUs")
    parser.add_argument("--images", type=int, default=20, help="images per request")
    parser.add_argument("--repeats", type=int, default=30, help="timed requests")


def run(arguments: argparse.Namespace, record: Record) -> None:
    ranks = sorted({1, *arguments.ranks})
    if not arguments.tiny and torch.cuda.device_count() < ranks[-1]:
        raise SystemExit(f"{ranks[-1]} ranks need as many GPUs; there are {torch.cuda.device_count()}")
    settings = {"tower": "tiny" if arguments.tiny else "qwen3-vl-8b", "images": arguments.images}
    record.settings.update(**settings, pixels=PIXELS, **LIMITS)
    alone: Any = None
    for num_ranks in ranks:
        measured = measure(num_ranks, arguments)
        times = summarize(measured["times"])
        alone = alone or {**measured, **times}
        error = relative_error(measured["items"], alone["items"])
        record({"ranks": num_ranks, **times, "speed-up": alone["p50"] / times["p50"], "error": error})
