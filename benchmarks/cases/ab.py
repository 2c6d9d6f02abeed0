"""Two commits side by side on one device: the Qwen3-VL-8B vision tower by the manager of each, in turns.

    git worktree add /tmp/base COMMIT
    python benchmarks/bench.py ab --baseline /tmp/base --output ab.json

A turn is `bench.py encoder --variants ours-auto` of one checkout: a new process, which compares its outputs
with eager's before it takes times, and finds what its checkout compiled in earlier turns. Milliseconds: "p50"
to the end of the device's work, "host" on the CPU, "device" between events. "ratio" is the median of this
checkout's turns over the baseline's; "lowest" and "highest" are of one turn of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from storage import ROOT, Record, Result, Row, environment, load

TOWER = "qwen3-vl-8b"
SIDES = ("baseline", "this")
TIMES = ("p50", "host", "device")
IMAGES = ("1x224", "1x448", "1x896", "1x1344", "mixed8", "20x336")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline", type=Path, required=True, metavar="DIR", help="root of a checkout")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--config", type=json.loads, default={}, metavar="JSON", help="settings of managers")


def options_of(arguments: argparse.Namespace) -> list[str]:
    """What both checkouts are asked."""
    asked = ["--variants", "ours-auto", "--shared-cache", "--config", json.dumps(arguments.config)]
    return [*asked, "--quick"] if arguments.tiny else [*asked, "--towers", TOWER, "--workloads", *IMAGES]


def turn(root: Path, folder: Path, options: Sequence[str]) -> Result:
    """The result of the case `encoder` by one checkout, whose caches are in a folder."""
    output = folder / "encoder.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, root / "benchmarks" / "bench.py", "encoder", *options, "--output", output]
    done = subprocess.run(command, env=environment(root, folder), cwd=root, check=False)
    if not output.exists():
        raise SystemExit(f"{root}: its benchmark ended with exit code {done.returncode}")
    return load(output)


def compare(turns: Mapping[str, Sequence[Result]]) -> list[Row]:
    """A row for each workload and each of its times that both sides have in all turns."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for side, results in turns.items():
        for row in (row for result in results for row in result["rows"]):
            for what in TIMES:
                times = found.setdefault((row["workload"], what), {name: [] for name in SIDES})[side]
                times += [row[what]] if row.get(what) is not None else []
    rows = []
    for (workload, what), times in found.items():
        theirs, ours = (times[side] for side in SIDES)
        if len(theirs) == len(ours) == len(turns["this"]):
            medians = {side: statistics.median(times[side]) for side in SIDES}
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            row = {"workload": workload, "time": what, **medians}
            row |= {"ratio": medians["this"] / medians["baseline"]}
            rows.append({**row, "lowest": min(ratios), "highest": max(ratios)})
    return rows


def run(arguments: argparse.Namespace, record: Record) -> None:
    roots = dict(zip(SIDES, (arguments.baseline.resolve(), ROOT), strict=True))
    if not (roots["baseline"] / "benchmarks" / "bench.py").is_file():
        raise SystemExit(f"--baseline: expected the root of a checkout; got {arguments.baseline}")
    turns: dict[str, list[Result]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="ab_") as folder:
        for _ in range(arguments.rounds):
            for side, root in roots.items():
                turns[side].append(turn(root, Path(folder) / side, options_of(arguments)))
    record.settings.update(rounds=arguments.rounds, config=arguments.config)
    record.settings["baseline"] = turns["baseline"][0]["commit"]
    failed = [
        {"side": side, **row}
        for side, results in turns.items()
        for result in results
        for row in result["rows"]
        if "failure" in row
    ]
    for row in [*compare(turns), *failed]:
        record(row)
