"""Which kernels the GPU spends a request on.

    python benchmarks/bench.py kernels --output out/kernels.json
    python benchmarks/bench.py kernels --towers internvl3-8b --workloads tiles12 --variants ours-auto compile

Published sizes, seeded random weights. Per workload, medians in milliseconds of its first request: "wall"
without a profiler; then "span", from the first kernel's start to the last one's end, how much of it kernels
of each kind take by their names, each counted where they run side by side, and "gaps", in which none runs.
"calls" is how many there are.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from models import DEFAULT_TOWERS, make_model, tower_names
from storage import Record, Row
from timing import release, synchronize, wall_ms
from vllm_variants import CONTENDERS
from worker import known_workloads, settle

REST = "norms and pointwise"
KINDS = {
    REST: r"^triton_(poi|per|red)_",  # their names have those of products that they follow
    "attention": r"flash|fmha|sdpa|attn|attend",
    "products": r"gemm|nvjet|xmma|cutlass|cublas|splitk|conv|triton_tem",
    "copies": r"^mem(cpy|set)",
}
"""The first that a name contains is its kind; else it is the rest."""
_SAMPLES = 10


class Kernel(NamedTuple):
    """One that ran; microseconds."""

    name: str
    start: float
    end: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--towers", nargs="+", choices=tower_names(), default=DEFAULT_TOWERS[:1], metavar="TOWER")
    add("--workloads", nargs="+", metavar="NAME", help="of those that a tower takes")
    add("--variants", nargs="+", choices=list(CONTENDERS), default=["ours-auto"], metavar="NAME")
    add("--config", type=json.loads, default={}, metavar="JSON", help="settings of managers")


def kind_of(name: str) -> str:
    """What a kernel is for, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), REST)


def shares(runs: Sequence[Sequence[Kernel]]) -> dict[str, float]:
    """Milliseconds of a request by kind of kernel, medians of runs."""
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


def profiled(call: Any) -> list[Kernel]:
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


def measure(tower: str, variant: str, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row for each workload."""
    model = make_model(tower, None, torch.device("cuda"), torch.bfloat16)
    contender = CONTENDERS[variant](model, options.config)
    contender.start()
    for name, workload in known_workloads(tower, False).items():
        if options.workloads and name not in options.workloads:
            continue
        row: Row = {"workload": name}
        if reason := contender.why_not(workload):
            yield {**row, "skipped": reason}
            continue
        batch = model.batch(workload[0])
        call = functools.partial(contender.run, batch)
        contender.prepare(batch)
        settle([call], contender.seconds_to_settle)
        known = {"patches": batch.patches, "note": contender.note(batch), "wall": wall_ms(call)}
        yield {**row, **known, **shares([profiled(call) for _ in range(_SAMPLES)])}


@torch.no_grad()
def run(options: argparse.Namespace, record: Record) -> None:
    record.settings.update(config=options.config, dtype="bfloat16", samples=_SAMPLES)
    for tower, variant in itertools.product(options.towers, options.variants):
        record.all(measure(tower, variant, options), tower=tower, variant=variant)
        torch._dynamo.reset()
        release()
