"""Requests of mixed images through the Qwen3-VL-8B vision tower: latency of `execute` against others.

    python benchmarks/bench.py requests --output out/requests.json

27 blocks, bf16; 1 to 16 images of lognormal sizes. Wall milliseconds, the median of a few repeats after all
requests have run twice (cuDNN plans a shape at its second). "eager": the Hugging Face tower (sdpa). "powers
of two": our program in one full graph for each from 64 to 8192 tokens, greedy packing, as vLLM's encoder CUDA
graphs serve. "ours": the default settings; "greedy" and "greedy_defer": ours with that `packing`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from models import TINY, Batch, captured, make_model, rows_of
from storage import Record
from timing import percentile, wall_ms
from worker import checked_error
from workloads import MOST_IMAGES, photographs

import fxsplit_encoder as fx
from fxsplit_encoder.models.eager import share_weights
from fxsplit_encoder.models.random import DEMO_MODEL

_POWERS_OF_TWO = [64 << power for power in range(8)]
_TINY_LIMITS = {"token_budgets": [64, 512], "max_items_per_batch": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)


def time_requests(
    requests: Sequence[Batch], calls: Mapping[str, Any], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each request, by variant."""
    for request, call in itertools.product([*requests] * 2, calls.values()):
        call(request)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for request, (name, call) in itertools.product(requests, calls.items()):
        times[name].append(wall_ms(functools.partial(call, request), repeats, 0))
    return times


def summary(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Mean, median and 99th percentile of each variant, and how its slowest request compares with eager."""
    return [
        {
            "variant": name,
            "mean": statistics.fmean(mine),
            "p50": statistics.median(mine),
            "p99": percentile(mine, 0.99),
            "slowest / eager": max(a / b for a, b in zip(mine, times["eager"], strict=True)),
            "requests": len(mine),
        }
        for name, mine in times.items()
    ]


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    tiny, device = arguments.tiny, arguments.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = make_model(TINY if tiny else DEMO_MODEL, None, torch.device(device), dtype)
    tower = fx.wrap(share_weights(model.module))
    limits = {"max_items_per_batch": 16, "max_frames_per_batch": 0, **(_TINY_LIMITS if tiny else {})}
    budgets = limits.get("token_budgets", _POWERS_OF_TWO)
    configs = {
        "powers of two": {**limits, "mode": "full", "packing": "greedy", "token_budgets": budgets},
        "ours": limits,
        **{packing: {**limits, "packing": packing} for packing in ("greedy", "greedy_defer")},
    }
    count, most = (2, 2) if tiny else (arguments.requests, MOST_IMAGES)
    requests = [model.batch(request) for request in photographs(count, most)]
    managers, calls = {}, {"eager": model.eager}
    for name, config in configs.items():
        managers[name] = captured(tower, **config)
        calls[name] = lambda batch, manager=managers[name]: manager.execute(batch.mm_kwargs)
    expected = rows_of(model.eager(requests[0]))
    errors = {name: checked_error(rows_of(call(requests[0])), expected) for name, call in calls.items()}
    record.settings.update(tower=model.name, managers=configs)
    for row in summary(time_requests(requests, calls, arguments.repeats)):
        row["error"] = errors[row["variant"]]
        if row["variant"] in managers:
            row["padding"] = managers[row["variant"]].stats().padding_fraction
        record(row)
