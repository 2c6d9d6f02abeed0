"""How the benchmarks take times: medians after warm-up, in milliseconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_WARMUPS = 5
_CAPTURED_CALLS = 20
_SPREAD = {"p10": 0.1, "p90": 0.9}


@dataclass(frozen=True)
class Times:
    """Milliseconds of calls that were timed in turn."""

    p50: float
    """Median of the wall times, each up to the end of the device's work."""
    p99: float
    """99th percentile (nearest rank) of the same."""
    cpu: float
    """Median time that a call keeps the CPU, its device work not awaited."""
    gpu: float | None
    """Median between events around a call, gaps between kernels included; None without CUDA."""
    samples: int


def measure(calls: Sequence[Callable[[], Any]], device: torch.device, samples: int) -> Times:
    """Times calls in turn, `samples` in all and each at least once; they have been warmed up before."""
    rounds = math.ceil(samples / len(calls))
    for call in calls:
        call()
    wall, cpu = [], []
    for call in [*calls] * rounds:
        synchronize()
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        synchronize()
        wall.append((time.perf_counter() - start) * 1e3)
        cpu.append((returned - start) * 1e3)
    gpu = None
    if device.type == "cuda":
        gpu = statistics.median(_between_events(call) for call in [*calls] * rounds)
    wall.sort()
    p99 = wall[math.ceil(0.99 * len(wall)) - 1]
    return Times(statistics.median(wall), p99, statistics.median(cpu), gpu, len(wall))


def summarize(samples: Sequence[float]) -> dict[str, float]:
    """What is stored of samples: median, 10th and 90th percentiles (nearest rank), number."""
    ordered = sorted(samples)
    ranks = {name: max(0, math.ceil(share * len(ordered)) - 1) for name, share in _SPREAD.items()}
    spread = {name: ordered[rank] for name, rank in ranks.items()}
    return {"p50": statistics.median(ordered), **spread, "samples": len(ordered)}


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gpu_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds between events around a call."""
    for _ in range(_WARMUPS):
        call()
    return statistics.median(_between_events(call) for _ in range(repeats))


def captured_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of one call past launches: of several in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_CAPTURED_CALLS):
            call()
    return gpu_ms(graph.replay) / _CAPTURED_CALLS


def device_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median milliseconds of a call on its device: between events on a GPU, wall time elsewhere."""
    return gpu_ms(call) if device.type == "cuda" else wall_ms(call)


def wall_ms(call: Callable[[], Any], repeats: int = 30, warmups: int = _WARMUPS) -> float:
    """Median milliseconds of a call up to the end of its device work."""
    for _ in range(warmups):
        call()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def cpu_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds that a call keeps the CPU, its device work not awaited."""
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _between_events(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
