"""How the benchmarks take times, and what is stored of them: medians with their spread, in milliseconds."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Gives back device memory that no tensor owns any more."""
    gc.collect()
    synchronize()
    torch.cuda.empty_cache()


def device_for(case: str, tiny: bool = False) -> str:
    """ "cuda", or "cpu" where there is none and the case is asked for tiny sizes; raises SystemExit."""
    if torch.cuda.is_available():
        return "cuda"
    if tiny:
        return "cpu"
    raise SystemExit(
        f"{case}: needs a CUDA device, or --tiny where the case has it: without one nothing is captured"
    )


def summarize(samples: Sequence[float]) -> dict[str, float]:
    """What is stored of samples: median, 10th and 90th percentiles (nearest rank), number."""
    ordered = sorted(samples)
    spread = {"p10": percentile(ordered, 0.1), "p90": percentile(ordered, 0.9)}
    return {"p50": statistics.median(ordered), **spread, "samples": len(ordered)}


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample at a share of them in order, by nearest rank."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a call to the end of its device work, and those that it keeps the CPU."""
    synchronize()
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    synchronize()
    return (time.perf_counter() - start) * 1e3, (returned - start) * 1e3


def measure(calls: Sequence[Callable[[], Any]], samples: int, warmups: int = 1) -> dict[str, Any]:
    """Times calls in turn, `samples` in all and each at least once.

    Returns:
        Milliseconds: `summarize` of the wall times to the end of the device's work; "host": median time that
        a call keeps the CPU; "device": median between events around a call, gaps between kernels included,
        None without CUDA.
    """
    for call in [*calls] * warmups:
        call()
    rounds = [*calls] * math.ceil(samples / len(calls))
    wall, host = zip(*(timed(call) for call in rounds), strict=True)
    device = statistics.median(map(between_events, rounds)) if torch.cuda.is_available() else None
    return {**summarize(wall), "host": statistics.median(host), "device": device}


def in_turns(
    calls: Mapping[str, Callable[[], Any]], samples: int, warmups: int
) -> dict[str, list[tuple[float, float]]]:
    """What `timed` gives for each of several calls, each once a round: what changes over time meets all."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(-warmups, samples):
        for name, call in calls.items():
            times = timed(call)
            taken[name] += [times] if turn >= 0 else []
    return taken


def wall_ms(call: Callable[[], Any], samples: int = 30, warmups: int = 5) -> float:
    """Median milliseconds of a call to the end of its device work."""
    for _ in range(warmups):
        call()
    return statistics.median(timed(call)[0] for _ in range(samples))


def host_us(call: Callable[[], Any], samples: int, warmups: int = 0) -> float:
    """Median microseconds that a call keeps the CPU."""
    for _ in range(min(warmups, samples)):
        call()
    return 1e3 * statistics.median(timed(call)[1] for _ in range(samples))


def between_events(call: Callable[[], Any]) -> float:
    """Milliseconds of the device between events before and after a call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
