"""Where the time of a start goes: each phase of a cold start, of a second one, and of one from a saved file,
each in a process of its own.

    python benchmarks/bench.py start --output out/start.json

The Qwen3-VL-8B vision tower, 27 blocks, bf16, random weights, 16 budgets, mode `full`. `--tower` takes that
of another model, with its configuration in configs/; the import of its model's code is in "tower". `--tiny`
takes a tiny tower and 4 budgets, for a machine without a GPU, where nothing is a graph and pieces run as
traced. The cold start has empty caches, the second one what the first left there; the one from a file has
empty caches and what the first saved. Where packages lie without bytecode, which the table says, every
process compiles what it imports: `gpu_host.sh bytecode` does that before. Seconds:

* "import": torch, transformers and this package, "own import" being this package's part. "tower": making the
  tower, which a server does by reading its checkpoint; it is not part of the total.
* "load": `load_start`. "compile", "capture": those methods of the manager. "first embedding": the first
  `execute`. "save": `save_start`, which is not part of the total.

"traced" counts Dynamo's graphs, "compiled" the pieces that Inductor compiled, "kernels" what Triton and
FlashAttention 4 did while capturing, "measured" the classes of attention whose kernels were timed. `--profile
DIR` writes where the CPU was in each phase, which makes them slower.

`--spent` shares out the seconds of compiling and capturing: "trace", "pieces" (what Inductor compiles),
"kernels compared", "captures" and "timings" (of replays, of exact shapes and of the tower's own forward),
each without what is inside it of another kind; "calls" says how often, and below them are the seconds of each
kernel that was compared and of each phase of torch's compiler. To watch them imports some of what
compiling would, so the other columns are for runs without it.

"bytes" is what the captures take; the start "largest alone" captures the largest budget alone. The start
"ready at once" has empty caches and calls `capture(wait=False)`: its "first embedding" follows the captures
of the uncompiled tower, "done" is seconds from that call to the end of the work behind it, "longest request"
and "median request" are milliseconds of requests of one image meanwhile, every 20 ms, beside "eager",
"longest steps" those of what requests may have waited for; "longest requests" are the three that took
longest, each with what the library logged during it.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import json
import logging
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOWER = "qwen3-vl-8b"
BUDGETS = (16, 32, 48, 64, 96, 128, 196, 256, 324, 400, 512, 784, 1024, 1296, 1764, 2304)
TINY_BUDGETS = (4, 16, 32, 64)
LIMITS = {"mode": "full", "max_items_per_batch": 4, "max_frames_per_batch": 8}
PHASES = ("import", "load", "compile", "capture", "first embedding")
STARTS = ("cold", "second", "from file", "ready at once", "largest alone")
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "cache",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "cute",
}
_SAID = 12
"""The most messages that are kept of a request."""
_BENCH = Path(__file__).resolve().parents[1] / "bench.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="a tiny tower, on a CPU too")
    parser.add_argument("--tower", default=TOWER, help="of which model, a name of cases/towers.py")
    parser.add_argument("--spent", action="store_true", help="share out compiling and capturing")
    parser.add_argument("--budgets", type=json.loads, metavar="JSON", help="other token budgets")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS, help="those to make")
    parser.add_argument("--file", help="where the cold start saves it, or an earlier one did")
    parser.add_argument("--profile", metavar="DIR", help="write where the CPU was in each phase")
    parser.add_argument("--in-this-process", metavar="NAME", help="one start; prints its row")
    parser.add_argument("--save", metavar="FILE", help="of one start: save it")
    parser.add_argument("--load", metavar="FILE", help="of one start: begin with what was saved")


class Phases:
    """Seconds of each phase.

    Args:
        profile: where the profiles of the phases go; None: none are made.
    """

    def __init__(self, profile: Path | None) -> None:
        self.seconds: dict[str, float] = {}
        self._profile = profile

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        profiler = None if self._profile is None else cProfile.Profile()
        begin = time.perf_counter()
        if profiler is not None:
            profiler.enable()
        yield
        if "import" not in name:
            from timing import synchronize

            synchronize()
        if profiler is not None:
            profiler.disable()
        self.seconds[name] = time.perf_counter() - begin
        if profiler is not None and self._profile is not None:
            with (self._profile / f"{name}.txt").open("w", encoding="utf-8") as file:
                pstats.Stats(profiler, stream=file).sort_stats("cumulative").print_stats(120)


def start(arguments: argparse.Namespace, budgets: Sequence[int]) -> dict[str, Any]:
    """One start in this process: seconds of each phase, and what the captures take."""
    phases = Phases(profile_of(arguments))
    phase, seconds = phases.phase, phases.seconds
    with phase("import"):
        make_manager, wrap, own_import = imported()

    import torch
    from spent import Spent

    from fxsplit_encoder.models.random import random_inputs

    spent = Spent()
    if arguments.spent:
        spent.watch()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with phase("tower"):
        tower = wrap(make_tower(arguments, device))
    manager = make_manager(tower, config_of(arguments, budgets))
    with phase("load"):
        if arguments.load is not None and not manager.load_start(arguments.load):
            raise SystemExit(manager.reports[0])
    measurements = manager.kernels.attention.measurements
    known = len(measurements.table(manager.device))
    at_once = arguments.in_this_process == "ready at once"
    with phase("compile"):
        if not at_once:
            manager.compile()
    kernels = count_kernels()
    log = Log(listen=at_once)
    with phase("capture"):
        manager.capture(wait=not at_once)
    packed = hasattr(tower, "patch_features")
    inputs = random_inputs(tower, [(16 if arguments.tiny else 256) if packed else 1])
    with phase("first embedding"):
        manager.execute(inputs)
    meanwhile = serve_meanwhile(manager, inputs, log) if at_once else {}
    measured = len(measurements.table(manager.device)) - known
    if arguments.save is not None:
        with phase("save"):
            seconds["file bytes"] = manager.save_start(arguments.save)
    return {
        **seconds,
        **meanwhile,
        "own import": own_import,
        "total": sum(seconds[name] for name in PHASES),
        "traced": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "compiled": torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"],
        "kernels": count_kernels() - kernels,
        "measured": measured,
        "captured": sum(map(len, manager.budget_graphs.values())),
        "bytes": manager.num_bytes,
        **(spent.row(seconds["compile"]) if arguments.spent else {}),
    }


def imported() -> tuple[Any, Any, float]:
    """What makes a manager and what wraps a tower, and the seconds that importing this package takes."""
    import torch  # noqa: F401 - which the model's own code needs in any case
    import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

    begin = time.perf_counter()
    import fxsplit_encoder as fx

    return fx.EncoderCudaGraphManager, fx.wrap, time.perf_counter() - begin


def profile_of(arguments: argparse.Namespace) -> Path | None:
    """Where the profiles of one start go, if any are made."""
    if arguments.profile is None:
        return None
    profile = Path(arguments.profile) / arguments.in_this_process.replace(" ", "-")
    profile.mkdir(parents=True, exist_ok=True)
    return profile


def make_tower(arguments: argparse.Namespace, device: str) -> Any:
    """The tower of a start, with random weights."""
    import torch
    from models import tiny_tower

    from fxsplit_encoder.models.random import demo_tower

    if arguments.tiny:
        return tiny_tower().to(device)
    return demo_tower(None, device, torch.bfloat16, model=arguments.tower)


def config_of(arguments: argparse.Namespace, budgets: Sequence[int]) -> Any:
    """The settings of a start: those of this case, or for another tower than its own those in configs/."""
    import fxsplit_encoder as fx

    if arguments.tiny or arguments.tower == TOWER:
        return fx.EncoderConfig(**LIMITS, token_budgets=tuple(budgets))
    from cases.towers import chosen_config

    config = chosen_config(arguments.tower, tiny=False)
    return config.replace(token_budgets=tuple(budgets)) if budgets else config


def serve_meanwhile(manager: Any, request: dict[str, Any], log: Log) -> dict[str, Any]:
    """Requests until everything is captured: how long they took beside eager's, and how long that took.

    A request waits for its own stream, as who copies its outputs does, and not for what else the device does.
    """
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def milliseconds(call: Callable[[], Any]) -> float:
        wait()
        start = time.perf_counter()
        call()
        wait()
        return (time.perf_counter() - start) * 1e3

    took: list[tuple[float, float, float]] = []
    while True:
        is_over = manager.wait_captured(0)
        start = time.perf_counter()
        took.append((milliseconds(lambda: manager.execute(request)), start, time.perf_counter()))
        if is_over:
            break
        time.sleep(0.02)
    progress = manager.stats().progress
    eager = [milliseconds(lambda: manager.tower.encoder_eager_forward(request)) for _ in range(5)]
    return {
        "done": progress.seconds,
        "ended": str(progress),
        "longest request": max(took)[0],
        "longest requests": [(each[0], log.said_between(*each[1:])) for each in sorted(took)[:-4:-1]],
        "longest steps": log.longest_steps(5),
        "median request": statistics.median(each[0] for each in took),
        "requests": len(took),
        "eager": statistics.median(eager),
    }


def has_bytecode() -> bool:
    """Whether Python finds its packages compiled, as pip leaves them."""
    import torch

    return Path(importlib.util.cache_from_source(torch.__file__)).exists()


class Log(logging.Handler):
    """What the library says meanwhile, and when; of its steps between requests, which it logs at their end,
    each with what was last said in it.
    """

    def __init__(self, *, listen: bool) -> None:
        super().__init__(logging.DEBUG)
        self._said: list[tuple[float, str]] = [(time.perf_counter(), "")]
        self._steps: list[tuple[float, str]] = []
        if listen:
            logger = logging.getLogger("fxsplit_encoder")
            logger.addHandler(self)
            logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()[:200]
        if ": a step of " in message:
            phase, _, took = message.partition(": a step of ")
            self._steps.append((float(took.removesuffix(" ms")), f"{phase}: {self._said[-1][1]}"))
        self._said.append((time.perf_counter(), message))

    def longest_steps(self, number: int) -> list[tuple[float, str]]:
        """Milliseconds, and what was last said in them."""
        return sorted(self._steps, reverse=True)[:number]

    def said_between(self, start: float, end: float) -> list[str]:
        """What was said last before the first of two times, and until the second."""
        before = max(when for when, _ in self._said if when <= start)
        return [message for when, message in self._said if before <= when <= end][:_SAID]


def count_kernels() -> int:
    """Compiled kernels in the caches of Triton and of FlashAttention 4."""
    triton = Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")
    cute = Path(os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"]).rglob("*.o")
    return sum(1 for _ in (*triton, *cute))


def in_new_process(
    name: str, arguments: argparse.Namespace, budgets: Sequence[int], caches: str, *options: str
) -> dict[str, Any]:
    options += ("--in-this-process", name, "--budgets", json.dumps(budgets))
    options += ("--tower", arguments.tower)
    options += ("--tiny",) if arguments.tiny else ()
    options += ("--spent",) if arguments.spent else ()
    options += ("--profile", arguments.profile) if arguments.profile is not None else ()
    environment = {**os.environ, **{name: f"{caches}/{folder}" for name, folder in CACHES.items()}}
    environment["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    command = [sys.executable, str(_BENCH), "start", *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def run(arguments: argparse.Namespace) -> int:
    own = BUDGETS if arguments.tower == TOWER else ()
    budgets = arguments.budgets or (TINY_BUDGETS if arguments.tiny else own)
    if arguments.in_this_process:
        print(json.dumps(start(arguments, budgets)))
        return 0
    from storage import new_result, store
    from tables import starts

    tower = "tiny" if arguments.tiny else arguments.tower
    limits = LIMITS if arguments.tiny or tower == TOWER else {}
    result = new_result("start", tower=tower, **limits, token_budgets=list(budgets), bytecode=has_bytecode())
    with tempfile.TemporaryDirectory() as made:
        for name in arguments.starts:
            if name == "largest alone" and not budgets:
                continue  # its budgets are not known here
            file, options = arguments.file or f"{made}/saved.start", []
            if name == "cold":
                options = ["--save", file]
            elif name == "from file":
                options = ["--load", file]
            own = {"from file": "empty", "ready at once": "at-once"}
            caches = f"{made}/{own.get(name, 'caches')}"
            its_budgets = [max(budgets)] if name == "largest alone" else budgets
            row = in_new_process(name, arguments, its_budgets, caches, *options)
            result["rows"].append({"start": name, **row})
            store(arguments.output, result)
    print(starts(result))
    if arguments.spent:
        from spent import shares

        print(*(shares(row) for row in result["rows"]), sep="\n")
    return 0
