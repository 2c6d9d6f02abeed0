"""Which kernels the GPU spends a request on: of each kind its milliseconds in the span of the request."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from timing import synchronize

REST = "norms and pointwise"
KINDS = {
    REST: r"^triton_(poi|per|red)_",  # their names have those of products that they follow
    "attention": r"flash|fmha|sdpa|attn|attend",
    "products": r"gemm|nvjet|xmma|cutlass|cublas|splitk|conv|triton_tem",
    "copies": r"^mem(cpy|set)",
}
"""The first that a name contains is its kind; else it is the rest."""
SAMPLES = 10


class Kernel(NamedTuple):
    """One that ran; microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """What a kernel is for, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), REST)


def shares(runs: Sequence[Sequence[Kernel]]) -> dict[str, float]:
    """Milliseconds of a request by kind of kernel, each counted where they run side by side, medians of runs:
    of the "span" from the first kernel's start to the last one's end, and its "gaps"; and how many "calls".
    """
    rows = [_of_run(run) for run in runs]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _of_run(kernels: Sequence[Kernel]) -> dict[str, float]:
    busy, gaps = dict.fromkeys(KINDS, 0.0), 0.0
    ordered = sorted(kernels, key=lambda each: each.start)
    end = ordered[0].start
    for kernel in ordered:
        busy[kind_of(kernel.name)] += (kernel.end - kernel.start) / 1e3
        gaps += max(0.0, kernel.start - end) / 1e3
        end = max(end, kernel.end)
    return {"span": (end - ordered[0].start) / 1e3, **busy, "gaps": gaps, "calls": len(kernels)}


def profiled(call: Callable[[], Any]) -> list[Kernel]:
    """What one call runs on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == device and event.time_range.end > event.time_range.start
    ]
