"""Attacks the padding proof with random graphs: `python -m tests.compile.padding.fuzzer --graphs 50000`.

Prints one line, and every graph that was proved and is wrong; the exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import sys
import time
from collections import Counter

import torch

from .fuzzing.campaign import FOCUSES, Tally, run_campaign

_CHUNK = 250


def _chunk(bounds: tuple[int, int]) -> Tally:
    torch.set_num_threads(1)
    tally = run_campaign(range(*bounds))
    # Nodes do not pass between processes; the text says all.
    tally.wrong = [dataclasses.replace(outcome, wrong=None) for outcome in tally.wrong]
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first graph's; the others' follow")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--operations", action="store_true", help="print how often each was proved")
    arguments = parser.parse_args()
    first, end = arguments.seed, arguments.seed + arguments.graphs
    chunks = [(start, min(start + _CHUNK, end)) for start in range(first, end, _CHUNK)]
    begun = time.monotonic()
    total = Tally()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        for tally in pool.map(_chunk, chunks):
            total.join(tally)
            for outcome in tally.wrong:
                print(f"seed {outcome.seed}: {outcome.text}\n", flush=True)
    _report(total, time.monotonic() - begun, arguments.operations)
    return 1 if total.wrong else 0


def _report(total: Tally, seconds: float, by_operation: bool) -> None:
    if by_operation:
        counts = Counter(dict.fromkeys(FOCUSES, 0))
        counts.update(total.accepted)
        print(", ".join(f"{name} {counts[name]}/{total.generated[name]}" for name in sorted(counts)))
    unproved = sorted(name for name in FOCUSES if not total.accepted[name])
    print(f"{total}; never proved: {', '.join(unproved) or 'none'}; {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
