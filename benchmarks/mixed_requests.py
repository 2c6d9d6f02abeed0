"""Requests of mixed images through the Qwen3-VL-8B vision tower: latency of `execute` against two others.

    python benchmarks/mixed_requests.py --output benchmarks/results/mixed_requests_h200.json

27 blocks, 1152 wide, bf16, seeded random weights. A request holds 1 to 16 images, all counts as likely; the
output tokens of an image are lognormal with a median of 500, its aspect ratio up to 2 to 1. Every request is
timed by each contender, wall milliseconds to the end of its device work, the median of a few repeats after
all requests have run twice (cuDNN plans a shape when it comes for the second time):

* "HF eager": the Hugging Face tower as it is (sdpa), the whole request at once.
* "power-of-two graphs": our compiled program in one full graph for each power of two from 64 to 8192 tokens,
  greedy packing into the smallest graph that fits: how vLLM's encoder CUDA graphs serve, without its tower.
* "ours": the default settings; `auto` modes, cost-aware packing, the default ladder of the same range.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from environment import describe
from storage import make_parser, store
from tables.layout import by_columns
from timing import wall_ms
from workloads import MOST_IMAGES, random_grid

import fxsplit_encoder as fx
from fxsplit_encoder.models.random import demo_tower

ITEMS = 16
POWERS_OF_TWO = tuple(64 << power for power in range(8))


def make_requests(count: int, features: int, seed: int = 0) -> list[dict[str, Any]]:
    """Seeded requests, patches on the device in the tower's dtype."""
    generator = random.Random(seed)
    requests = []
    for _ in range(count):
        grids = [random_grid(generator) for _ in range(generator.randint(1, MOST_IMAGES))]
        rows = sum(t * h * w for t, h, w in grids)
        pixels = torch.randn(rows, features, device="cuda").bfloat16()
        requests.append({"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)})
    return requests


def contenders(tower: Any) -> dict[str, fx.EncoderCudaGraphManager]:
    """A captured manager for each of the ways that are ours to run."""
    settings: dict[str, dict[str, Any]] = {
        "power-of-two graphs": {"mode": "full", "packing": "greedy", "token_budgets": POWERS_OF_TWO},
        "ours": {},
    }
    managers = {}
    for name, values in settings.items():
        config = fx.EncoderConfig(max_items_per_batch=ITEMS, max_frames_per_batch=0, **values)
        managers[name] = fx.EncoderCudaGraphManager(tower, config, log_interval=0)
        start = time.perf_counter()
        managers[name].capture()
        torch.cuda.synchronize()
        print(
            f"{name}: captured in {time.perf_counter() - start:.1f} s; {managers[name].stats()}\n", flush=True
        )
    return managers


def time_requests(
    requests: list[dict[str, Any]], hf: Any, managers: Any, repeats: int
) -> Iterator[dict[str, float]]:
    """The milliseconds of one request after the other, by contender."""
    calls: dict[str, Any] = {name: manager.execute for name, manager in managers.items()}
    on_device = [request["image_grid_thw"].cuda() for request in requests]
    for _ in range(2):
        for request, grid in zip(requests, on_device, strict=True):
            hf(request["pixel_values"], grid)
            for call in calls.values():
                call(request)
    for request, grid in zip(requests, on_device, strict=True):
        row = {"HF eager": wall_ms(lambda r=request, g=grid: hf(r["pixel_values"], g), repeats, 0)}
        for name, call in calls.items():
            row[name] = wall_ms(lambda c=call, r=request: c(r), repeats, 0)
        yield row


def summary(rows: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Mean, median and 99th percentile of each contender, and how it compares with eager."""
    lines = []
    for name in rows[0]:
        times = sorted(row[name] for row in rows)
        lines.append(
            {
                "contender": name,
                "mean": statistics.fmean(times),
                "p50": statistics.median(times),
                "p99": times[math.ceil(0.99 * len(times)) - 1],
                "mean / ours": statistics.fmean(times) / statistics.fmean(row["ours"] for row in rows),
                "slowest against eager": max(row[name] / row["HF eager"] for row in rows),
            }
        )
    return lines


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "mixed_requests.py needs a CUDA device: there is nothing to capture without one\n")
    torch.manual_seed(0)
    hf = demo_tower(27, "cuda", torch.bfloat16)
    tower = fx.wrap(copy.deepcopy(hf))
    managers = contenders(tower)
    requests = make_requests(arguments.requests, tower.patch_features)
    rows: list[dict[str, float]] = []
    result = {
        **describe(),
        "tower": "Qwen3-VL-8B vision, 27 blocks, bf16, random weights",
        "requests": len(requests),
        "grids": [request["image_grid_thw"].tolist() for request in requests],
        "rows": rows,
    }
    for row in time_requests(requests, hf, managers, arguments.repeats):
        rows.append(row)
        store(arguments.output, result)
    lines = summary(rows)
    print(by_columns({name: name for name in lines[0]}, lines, "simple"), "\n")
    for name, manager in managers.items():
        print(f"{name}: {manager.stats()}\n")
    stats = {name: manager.stats().as_dict() for name, manager in managers.items()}
    store(arguments.output, {**result, "summary": lines, "stats": stats})


if __name__ == "__main__":
    main()
