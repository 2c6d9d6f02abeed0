"""The benchmark: vision towers by every way to run them, side by side, in one run.

    python benchmarks/encoder.py --output out                      # everything; needs a GPU and hours
    python benchmarks/encoder.py --towers qwen3-vl-8b --contenders eager ours-auto graph-exact --output out
    python benchmarks/encoder.py --quick                           # a small version for any machine
    python benchmarks/encoder.py --merge a/encoder.json b/encoder.json --output out

Towers have their published sizes and seeded random weights. Every contender of every tower runs in a process
of its own; its outputs are checked against eager's before they are timed. Results are written after every
row, so a run that is cut off keeps what it has; parts from several GPUs are merged afterwards. Copied to
results/encoder_h200.json, they are what `documents.py` fills the documents' tables with.

Per workload: p50 and p99 of the wall time to the end of the device's work, CPU time (device work not
awaited), GPU time (between events), device memory beyond the tower's, seconds of first requests (compilation
and capture, where they are lazy), padding, error. "x floor" is the ratio to the arithmetic floor: the
operations of the matrix products, convolutions and attention over the rate of a large matrix product, which
each tower's run measures first. What every contender is, is told in `contenders.py` and `our_contenders.py`.
Inductor's cache is empty when a contender starts, so its seconds are those of a cold start; not with
`--shared-cache`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from environment import describe
from our_contenders import CONTENDERS
from records import FLOOR, Records, merge
from subjects import DEFAULT_TOWERS, kind_of, takes_flash, tower_names
from tables.encoder import OURS, all_rows, hardware, starts, summary
from worker import Job, known_workloads, run_job, start_method

RESULT = "encoder.json"
_QUICK_BLOCKS = 2
# The budgets that the small workloads need; capturing more takes a CPU minutes.
_QUICK_CONFIG: dict[str, dict[str, Any]] = {
    "packed": {"token_budgets": (4, 16), "max_items_per_batch": 4, "max_frames_per_batch": 0},
    "tiles": {"token_budgets": (256,), "max_items_per_batch": 1},
    "pages": {"paths": {"global": {"token_budgets": (272,)}, "local": {"token_budgets": (100,)}}},
}
# What the results of several runs must have in common.
_SETTINGS = ("quick", "dtype", "blocks", "samples", "shared_cache", "seconds")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--towers", nargs="+", choices=tower_names(), metavar="TOWER", help=", ".join(tower_names()))
    add("--workloads", nargs="+", metavar="NAME", help="of those that a tower takes")
    add("--contenders", nargs="+", choices=list(CONTENDERS), metavar="NAME", help=", ".join(CONTENDERS))
    add("--quick", action="store_true", help="one tower of two blocks, small images, few samples")
    add("--output", type=Path, default=Path("out"), help=f"folder for {RESULT} and the plots")
    add("--merge", nargs="+", type=Path, metavar="FILE", help="measure nothing; join these results")
    add("--blocks", type=int, help="the most blocks of a tower")
    add("--samples", type=int, help="the fewest timed calls of a row (30; quick, on a CPU: 3)")
    add("--seconds", type=float, default=1.0, help="how long a row's calls are timed at least, of up to 200")
    add("--timeout", type=float, default=900, help="the most seconds of a contender of a tower")
    add("--config", type=Path, help="YAML with settings of EncoderConfig for the managers")
    add("--shared-cache", action="store_true", help="let Inductor find what it compiled before")
    return parser.parse_args(arguments)


def make_jobs(options: argparse.Namespace, device: str) -> list[Job]:
    """What is to be measured, the floor of every tower first."""
    given = {} if options.config is None else yaml.safe_load(options.config.read_text())
    quick_samples = 3 if device == "cpu" else 30
    jobs = []
    for tower in options.towers or (DEFAULT_TOWERS[:1] if options.quick else DEFAULT_TOWERS):
        known = known_workloads(tower, options.quick)
        workloads = tuple(name for name in options.workloads or known if name in known)
        config = given or (_QUICK_CONFIG[kind_of(tower)] if options.quick else {})
        for contender in (FLOOR, *(options.contenders or CONTENDERS)):
            if workloads:
                jobs.append(
                    Job(
                        tower,
                        contender,
                        workloads,
                        options.quick,
                        device,
                        "bfloat16" if device == "cuda" else "float32",
                        options.blocks or (_QUICK_BLOCKS if options.quick else None),
                        options.samples or (quick_samples if options.quick else 30),
                        config,
                        options.shared_cache,
                        options.seconds,
                    )
                )
    return jobs


def run(jobs: Sequence[Job], timeout: float, path: Path) -> Records:
    """Measures job by job and writes what there is after every row."""
    first = jobs[0]
    settings = {name: getattr(first, name) for name in _SETTINGS}
    settings["config"] = None if first.quick else dict(first.config)
    records = Records(describe(), settings)
    method = start_method()
    for job in jobs:
        contender = CONTENDERS.get(job.contender)
        flash = takes_flash(job.tower)
        reason = contender and contender.unavailable(kind_of(job.tower), flash, job.device, job.quick)
        if reason:
            _say(f"{job.tower}, {job.contender}: not run: {reason}")
            records.skip(job.tower, job.contender, reason)
            continue

        def keep(event: dict[str, Any], job: Job = job) -> None:
            records.add(job.tower, job.contender, event)
            records.save(path)

        start = time.monotonic()
        failure = run_job(job, timeout, keep, method)
        _say(f"{job.tower}, {job.contender}: {failure or 'done'} ({time.monotonic() - start:.0f} s)")
        if failure is not None:
            records.fail(job.tower, job.contender, failure)
    records.save(path)
    return records


def report(records: Records, folder: Path) -> None:
    """Prints every table and draws the plots."""
    for tower in records.towers:
        print(f"\n{tower}: {hardware(records, tower)}\n")
        for table in (all_rows, starts, summary):
            print(table(records, tower), "\n")
    if records.environment["gpu"] is None:
        print("Without CUDA nothing is captured: these times say that everything runs, and no more.")
    else:
        for sentence in records.slower(OURS, "eager"):
            print(f"slower than eager: {sentence}")
    try:
        from plots import plot

        print("plots:", *plot(records, folder))
    except ModuleNotFoundError as error:
        print(f"no plots: {error}; --merge {folder / RESULT} draws them where matplotlib is installed")


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the process in hand is ended too
    path = options.output / RESULT
    if options.merge:
        records = merge([Records.load(part) for part in options.merge])
        for tower in records.towers:
            records.sort_workloads(tower, known_workloads(tower, records.settings["quick"]))
        records.save(path)
    else:
        jobs = make_jobs(options, "cuda" if torch.cuda.is_available() else "cpu")
        if not jobs:
            print("no tower takes any of these workloads", file=sys.stderr)
            return 2
        records = run(jobs, options.timeout, path)
    report(records, options.output)
    for failure in records.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if records.failures else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
