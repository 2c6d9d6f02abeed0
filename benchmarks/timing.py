"""How the benchmarks take times: medians after warm-up, in milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_WARMUPS = 5


def gpu_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds between events around a call."""
    for _ in range(_WARMUPS):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def wall_ms(call: Callable[[], Any], repeats: int = 30, warmups: int = _WARMUPS) -> float:
    """Median milliseconds of a call up to the end of its device work."""
    for _ in range(warmups):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def cpu_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds that a call keeps the CPU, its device work not awaited."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
