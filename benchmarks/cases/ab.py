"""Two commits side by side on one device: the Qwen3-VL-8B vision tower by the manager of each.

    git worktree add /tmp/base COMMIT
    python benchmarks/bench.py ab --baseline /tmp/base --output ab.json

Each side is a process with the package of its checkout. Outputs are compared with the eager model's, then a
few calls of a workload are timed in turns: "execute" to the end of its device work, "host" on the CPU,
"replay" between events around the CUDA graphs. "ratio" is the median of this checkout's over the baseline's;
"lowest" and "highest" are of a single turn. "full graph" is one image of 64 output tokens in a manager of
three budgets in mode `full`. Caches are empty.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import TINY_SETTINGS
from storage import ROOT, Record, Row, commit_of
from timing import summarize
from worker import ERROR_LIMITS
from workloads import WORKLOADS

SIDE = ROOT / "benchmarks" / "ab_side.py"
SIDES = ("baseline", "this")
IMAGES = ("1x224", "1x448", "1x896", "1x1344", "mixed8", "20x336")

_PIXELS_PER_TOKEN = 32
_FULL = {"mode": "full", "token_budgets": [64, 128, 256], "max_items_per_batch": 16}
_TOWER: dict[str, Any] = {"depth": 27, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]}
_TINY_CONFIG = {"token_budgets": [8, 16], "max_items_per_batch": 4, "max_frames_per_batch": 0}

Samples = dict[str, dict[str, list[list[float]]]]
"""By workload and by what was timed, a list for each turn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline", type=Path, required=True, metavar="DIR", help="root of a checkout")
    parser.add_argument("--baseline-commit", metavar="SHA", help="of a baseline that is no repository")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side")
    parser.add_argument("--samples", type=int, default=10, help="timed calls of a workload in a turn")
    parser.add_argument("--config", type=json.loads, default={}, metavar="JSON", help="settings of managers")


def settings_of(*, tiny: bool, config: Mapping[str, Any]) -> dict[str, Any]:
    """What both sides are told."""
    images: dict[str, Any] = {
        name: [_grid(*size) for size in WORKLOADS["packed"][name].requests[0].images] for name in IMAGES
    }
    if tiny:
        images = {"1x64": [[1, 4, 4]], "mixed2": [[1, 4, 4], [1, 4, 8]]}
    workloads = {name: {"manager": "default", "grids": grids} for name, grids in images.items()}
    side = 4 if tiny else 16
    workloads["full graph"] = {"manager": "full", "grids": [[1, side, side]]}
    full = {**_TINY_CONFIG, "mode": "full"} if tiny else {**_FULL, "max_frames_per_batch": 0}
    managers = {"default": {**(_TINY_CONFIG if tiny else {}), **config}, "full": {**full, **config}}
    tower = TINY_SETTINGS if tiny else _TOWER
    return {"tower": tower, "workloads": workloads, "managers": managers, "warmups": 2 if tiny else 20}


def _grid(height: int, width: int) -> list[int]:
    """Patches of an image, each side rounded to whole merged patches as the processor does."""
    rows, columns = (2 * max(1, round(length / _PIXELS_PER_TOKEN)) for length in (height, width))
    return [1, rows, columns]


class Side:
    """The process of one checkout."""

    def __init__(self, root: Path, caches: Path, settings: Mapping[str, Any]) -> None:
        self.root = root.resolve()
        if not (self.root / "fxsplit_encoder" / "__init__.py").is_file():
            raise SystemExit(f"--baseline: expected the root of a checkout with fxsplit_encoder/; got {root}")
        own = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "cache"}
        environment = {**os.environ, **{name: str(caches / folder) for name, folder in own.items()}}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.root), *_python_path()])
        self._connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, SIDE, str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, cwd=self.root, pass_fds=[theirs.fileno()])
        theirs.close()
        self._connection.send(settings)

    def start(self) -> dict[str, Any]:
        """Compiles and captures; raises SystemExit where another package was imported."""
        started = self.ask("start")
        if not Path(started["package"]).is_relative_to(self.root):
            raise SystemExit(
                f"expected the package of {self.root}; the process imported {started['package']}"
            )
        return started

    def ask(self, *command: Any) -> Any:
        self._connection.send(command)
        return self.answer()

    def answer(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            ended = f"{self.root}: the process ended with exit code {self._process.wait()}"
            raise SystemExit(ended) from error

    def stop(self) -> None:
        self._connection.close()
        self._process.wait()


def _python_path() -> list[str]:
    """What PYTHONPATH holds but this checkout, which the baseline must not see."""
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = (ROOT, SIDE.parent)
    return [path for path in listed if path and Path(path).resolve() not in own]


def measure(sides: Mapping[str, Side], workloads: Mapping[str, Any], rounds: int, samples: int) -> Any:
    """Samples by side, in turns."""
    found: dict[str, Samples] = {name: {workload: {} for workload in workloads} for name in sides}
    for _ in range(rounds):
        for workload in workloads:
            for name, side in sides.items():
                for what, times in side.ask("measure", workload, samples).items():
                    found[name][workload].setdefault(what, []).append(times)
    return found


def compare(samples: Mapping[str, Samples]) -> list[Row]:
    """A row for each workload and each of its times, in milliseconds, over the turns in which both sides have
    some: a manager that chooses the exact shape in a turn replays nothing there.
    """
    rows = []
    for workload, times in samples["this"].items():
        for what, mine in times.items():
            theirs = samples["baseline"][workload].get(what)
            pairs = [(a, b) for a, b in zip(mine, theirs or [], strict=False) if a and b]
            if not pairs:
                continue
            turns = [statistics.median(a) / statistics.median(b) for a, b in pairs]
            other, one = (
                summarize([ms for turn in side for ms in turn]) for side in zip(*pairs, strict=True)
            )
            rows.append(
                {
                    "workload": workload,
                    "time": what,
                    "baseline": one,
                    "this": other,
                    "ratio": other["p50"] / one["p50"],
                    "lowest": min(turns),
                    "highest": max(turns),
                }
            )
    return rows


def run(arguments: argparse.Namespace, record: Record) -> None:
    settings = settings_of(tiny=arguments.tiny, config=arguments.config)
    with contextlib.ExitStack() as stack:
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ab_")))
        sides = {}
        for name, root in zip(SIDES, (arguments.baseline, ROOT), strict=True):
            sides[name] = Side(root, caches / name, settings)
            stack.callback(sides[name].stop)
        for side in sides.values():
            side.answer()  # its tower is made
        started = {name: side.start() for name, side in sides.items()}
        samples = measure(sides, settings["workloads"], arguments.rounds, arguments.samples)
    baseline = arguments.baseline_commit or commit_of(arguments.baseline)
    record.settings.update(**settings, rounds=arguments.rounds, baseline=baseline)
    for what in ("seconds", "errors"):
        record.result[what] = {name: start[what] for name, start in started.items()}
    for row in compare(samples):
        record(row)
    limit = ERROR_LIMITS["float32" if record.result["gpu"] is None else "bfloat16"]
    for name, start in started.items():
        for workload, error in start["errors"].items():
            if not error <= limit:  # so written that NaN fails too
                failure = f"{name} differs from eager by {error:.2g} of its root mean square"
                record({"workload": workload, "failure": failure})
