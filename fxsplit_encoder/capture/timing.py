"""How long a call takes: what captures, their budgets and exact shapes are chosen by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fxsplit_encoder.pauses import pause

REPEATS = 3
"""Times that one thing is timed."""

# Milliseconds after which two are enough: a good part of capturing a ladder is waiting for what is timed.
_LONG_MS = 30.0

# Before another run of what takes longer, requests may go first.
_PAUSE_MS = 10.0


class MeasuredRun(NamedTuple):
    """Median milliseconds of a call."""

    wall: float
    """To the end of its device work."""
    host: float
    """Until it returns."""


def measure_run(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> MeasuredRun:
    """Times a call on the current stream after one warm-up. Fewer than `repeats` are timed where they take
    long, with a pause before each.
    """
    last = _timed(call, device)
    runs: list[MeasuredRun] = []
    while len(runs) < repeats and (len(runs) < 2 or sum(run.wall for run in runs) < _LONG_MS):
        if last.wall > _PAUSE_MS:
            pause()
        last = _timed(call, device)
        runs.append(last)
    walls, hosts = zip(*runs, strict=True)
    return MeasuredRun(statistics.median_low(walls), statistics.median_low(hosts))


def _timed(call: Callable[[], Any], device: torch.device) -> MeasuredRun:
    # For the stream, not the device: another thread may be capturing, which that would break.
    wait = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else _do_nothing
    wait()
    start = time.perf_counter()
    call()
    host = (time.perf_counter() - start) * 1e3
    wait()
    return MeasuredRun((time.perf_counter() - start) * 1e3, host)


def measure_ms(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Median milliseconds of a call after one warm-up, to the end of its device work."""
    return measure_run(call, device, repeats).wall


def _do_nothing() -> None: ...
