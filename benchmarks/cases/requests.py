"""Requests of mixed images through the Qwen3-VL-8B vision tower: latency of `execute` against others.

    python benchmarks/bench.py requests --output out/requests.json

27 blocks, bf16; 1 to 16 images of lognormal sizes. Wall milliseconds, the median of a few repeats after all
requests have run twice (cuDNN plans a shape at its second). "eager": the Hugging Face tower (sdpa). "powers
of two": our program in one full graph for each from 64 to 8192 tokens, greedy packing, as vLLM's encoder CUDA
graphs serve. "ours": the default settings; "greedy" and "greedy_defer": ours with that `packing`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from models import rows_of, tiny_tower
from storage import Record
from timing import percentile, wall_ms
from worker import ERROR_LIMITS, relative_error
from workloads import MOST_IMAGES, random_grid

import fxsplit_encoder as fx
from fxsplit_encoder.models.eager import share_weights
from fxsplit_encoder.models.random import demo_tower

_POWERS_OF_TWO = [64 << power for power in range(8)]
_TINY_LIMITS = {"token_budgets": [64, 512], "max_items_per_batch": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)


def make_requests(
    count: int, tower: Any, most_images: int = MOST_IMAGES, seed: int = 0
) -> list[dict[str, Any]]:
    """Seeded requests, patches on the device of the tower in its dtype."""
    generator = random.Random(seed)
    requests = []
    for _ in range(count):
        grids = [random_grid(generator) for _ in range(generator.randint(1, most_images))]
        rows = sum(t * h * w for t, h, w in grids)
        pixels = torch.randn(rows, tower.patch_features, device=tower.device).to(tower.dtype)
        requests.append({"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)})
    return requests


def time_requests(
    requests: Sequence[dict[str, Any]], calls: Mapping[str, Any], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each request, by variant."""
    for request in [*requests] * 2:
        for call in calls.values():
            call(request)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for request in requests:
        for name, call in calls.items():
            times[name].append(wall_ms(lambda c=call, r=request: c(r), repeats, 0))
    return times


def summary(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Mean, median and 99th percentile of each variant, and how its slowest request compares with eager."""
    rows = []
    for name, mine in times.items():
        rows.append(
            {
                "variant": name,
                "mean": statistics.fmean(mine),
                "p50": statistics.median(mine),
                "p99": percentile(mine, 0.99),
                "slowest / eager": max(a / b for a, b in zip(mine, times["eager"], strict=True)),
                "requests": len(mine),
            }
        )
    return rows


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    tiny, device = arguments.tiny, arguments.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hf = tiny_tower().to(device, dtype) if tiny else demo_tower(27, device, dtype)
    tower = fx.wrap(share_weights(hf))
    limits = {"max_items_per_batch": 16, "max_frames_per_batch": 0, **(_TINY_LIMITS if tiny else {})}
    budgets = limits.get("token_budgets", _POWERS_OF_TWO)
    configs = {
        "powers of two": {**limits, "mode": "full", "packing": "greedy", "token_budgets": budgets},
        "ours": limits,
        **{packing: {**limits, "packing": packing} for packing in ("greedy", "greedy_defer")},
    }
    torch.manual_seed(0)
    count, most = (2, 2) if tiny else (arguments.requests, MOST_IMAGES)
    requests = make_requests(count, tower, most)

    def eager(request: dict[str, Any]) -> Any:
        return hf(request["pixel_values"], request["image_grid_thw"].to(device))

    managers, calls = {}, {"eager": eager}
    for name, config in configs.items():
        managers[name] = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(**config), log_interval=0)
        managers[name].capture()
        calls[name] = managers[name].execute
    expected = rows_of(eager(requests[0]))
    limit = ERROR_LIMITS["bfloat16" if device == "cuda" else "float32"]
    errors = {name: relative_error(rows_of(call(requests[0])), expected) for name, call in calls.items()}
    if wrong := {name: error for name, error in errors.items() if not error <= limit}:
        raise SystemExit(f"requests: differ from eager by more than {limit} of its root mean square: {wrong}")
    record.settings.update(tower="tiny" if tiny else "qwen3-vl-8b", managers=configs)
    for row in summary(time_requests(requests, calls, arguments.repeats)):
        row["error"] = errors[row["variant"]]
        if row["variant"] in managers:
            row["padding"] = managers[row["variant"]].stats().padding_fraction
        record(row)
