"""Vision towers by every way to run them, side by side.

    python benchmarks/bench.py encoder --readme --output out/readme.json        # the README's table
    python benchmarks/bench.py encoder --output out/encoder.json                # four towers: an hour or two
    python benchmarks/bench.py encoder --towers qwen3-vl-8b --variants eager graph-exact ours-auto
    python benchmarks/bench.py encoder --quick                                  # a tiny tower, on any machine

Published sizes, seeded random weights, every variant of every tower in a process of its own; what differs
from eager is not timed. `--readme` starts each three times, at once where there are as many GPUs; a row is
the start of the median p50, "starts" are all of those. Milliseconds: median and percentiles of the wall time
to the end of the device's work; "host" and "device", between events; the share of padding, the error, device
memory beyond the tower's, and the first request ("first s"). "floor" is the operations over the rate of a
large matrix product; `--kernels` adds milliseconds by kind of kernel. "vllm-eager" and "vllm" are vLLM's own
class, compared with its own forward. Inductor's cache is empty when a variant starts, except with
`--shared-cache`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from models import DEFAULT_TOWERS, TINY, tower_names
from processes import visible_gpus
from storage import Record, Row
from variants import MODES
from vllm_classes import vllm_or_none
from vllm_variants import CONTENDERS
from worker import FLOOR, Job, known_workloads, run_job, start_method
from workloads import README

README_VARIANTS = ("eager", "ours-auto", "graph-exact", "compile", "vllm-eager", "vllm")
QUICK_VARIANTS = (FLOOR, "eager", "ours-auto", "graph-exact")
MAIN_VARIANTS = (*QUICK_VARIANTS, "compile-reduce-overhead", "compile-max-autotune", "vllm-eager", "vllm")
MODE_VARIANTS = ("eager", *(f"ours-{mode}" for mode in MODES))
_QUICK_CONFIG = {"token_budgets": [4, 16], "max_items_per_batch": 4, "max_frames_per_batch": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--readme", action="store_true", help="what the README's table needs")
    preset.add_argument("--modes", action="store_true", help="what the table in docs/capture.md needs")
    preset.add_argument("--quick", action="store_true", help="a tiny tower and small images")
    add("--towers", nargs="+", choices=tower_names(), metavar="TOWER", help=", ".join(tower_names()))
    add("--workloads", nargs="+", metavar="NAME", help="of those that a tower takes")
    add("--variants", nargs="+", choices=[FLOOR, *CONTENDERS], metavar="NAME", help=", ".join(CONTENDERS))
    add("--starts", type=int, help="processes of each variant; the median is kept; 1, for --readme 3")
    add("--samples", type=int, default=30, help="the fewest timed calls of a row")
    add("--seconds", type=float, default=1.0, help="how long a row's calls are timed at least, of up to 200")
    add("--timeout", type=float, default=900, help="the most seconds of a variant of a tower")
    add("--config", type=json.loads, default={}, metavar="JSON", help="settings of managers")
    add("--shared-cache", action="store_true", help="let Inductor find what it compiled before")
    add("--kernels", action="store_true", help="which kernels the GPU spends each request on")


def make_jobs(options: argparse.Namespace, device: str) -> list[Job]:
    """What is to be measured, in order."""
    towers, workloads, variants = DEFAULT_TOWERS, options.workloads, MAIN_VARIANTS
    config = options.config
    if options.readme:
        towers, workloads, variants = DEFAULT_TOWERS[:1], workloads or README, README_VARIANTS
    elif options.modes:
        towers, variants = DEFAULT_TOWERS[:1], MODE_VARIANTS
    elif options.quick:
        towers, variants, config = (TINY,), QUICK_VARIANTS, {**_QUICK_CONFIG, **config}
    bf16, samples = device == "cuda", options.samples
    each = {
        "quick": options.quick,
        "device": device,
        "dtype": "bfloat16" if bf16 else "float32",
        "samples": min(samples, 3) if options.quick and not bf16 else samples,
        "config": config,
        "shared_cache": options.shared_cache,
        "seconds": options.seconds,
        "kernels": options.kernels,
    }
    jobs = []
    for tower in options.towers or towers:
        known = known_workloads(tower, options.quick)
        chosen = tuple(name for name in workloads or known if name in known)
        if chosen:
            jobs += [Job(tower, variant, chosen, **each) for variant in options.variants or variants]
    return jobs


def measure(starts: Sequence[Sequence[Job]], timeout: float, record: Record) -> None:
    """Measures each start job by job, starts on other GPUs at once, and writes the medians after each row."""
    method = start_method()
    record.merge = medians

    def measure_jobs(jobs: Iterable[Job], gpu: str | None) -> None:
        for job in jobs:
            variant = CONTENDERS.get(job.variant)
            reason = variant and variant.unavailable(job.tower, job.device)
            if reason:
                print(f"{job.tower}, {job.variant}: not run: {reason}", flush=True)
                continue
            start = time.monotonic()
            failure = run_job(job, timeout, record, method, gpu)
            taken = time.monotonic() - start
            print(f"{job.tower}, {job.variant}: {failure or 'done'} ({taken:.0f} s)", flush=True)
            if failure is not None:
                record({"tower": job.tower, "variant": job.variant, "workload": "all", "failure": failure})

    gpus = visible_gpus()[: len(starts)]
    if len(gpus) < 2:  # in this thread, whose exit ends the process that it waits for
        measure_jobs(itertools.chain.from_iterable(starts), None)
    else:
        shares = [itertools.chain.from_iterable(starts[index :: len(gpus)]) for index in range(len(gpus))]
        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(measure_jobs, shares, gpus))
    record.store()


def medians(rows: Iterable[Row]) -> list[Row]:
    """Merges the rows of several starts: keeps the row of the median p50, with all of them as "starts"; a
    failed row where one failed.
    """
    same: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        same.setdefault((row["tower"], row["variant"], row["workload"]), []).append(row)
    found = []
    for several in same.values():
        failed = [row for row in several if "failure" in row]
        times = sorted(row["p50"] for row in several if "p50" in row)
        if failed or len(times) < 2:
            found.append((failed or several)[0])
            continue
        middle = statistics.median_low(times)
        found.append({**next(row for row in several if row["p50"] == middle), "starts": times})
    return found


def run(options: argparse.Namespace, record: Record) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the process in hand is ended too
    jobs = make_jobs(options, "cuda" if torch.cuda.is_available() else "cpu")
    if not jobs:
        raise SystemExit("encoder: no tower takes any of these workloads")
    first = jobs[0]
    names = ("quick", "dtype", "samples", "shared_cache", "seconds")
    record.settings.update({name: getattr(first, name) for name in names}, config=dict(first.config))
    record.result["vllm"] = vllm_or_none()
    measure([jobs] * (options.starts or (3 if options.readme else 1)), options.timeout, record)
    if record.result["gpu"] is None:
        print("Without CUDA nothing is captured: these times say that everything runs, and no more.")
