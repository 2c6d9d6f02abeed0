"""Where the time of a start goes: each phase of a cold start, of a second one, and of one from a saved file,
each in a process of its own.

    python benchmarks/bench.py start --output out/start.json

The Qwen3-VL-8B vision tower, 27 blocks, bf16, random weights, 16 budgets, mode `full`; `--tower` takes that
of another model, with its configuration in configs/. The cold start has empty caches, the second one what the
first left there; the one from a file has empty caches and what the first saved. Where packages lie without
bytecode, which the table says, every process compiles what it imports: `gpu_host.sh bytecode` does that
before. Seconds:

* "import": torch, transformers and this package, "own import" being this package's part. "tower": making the
  tower, which is not part of the total, as "save" (`save_start`) is not.
* "load": `load_start`. "compile", "capture": those methods of the manager. "first embedding": the first
  `execute`.

"traced" counts Dynamo's graphs, "compiled" the pieces that Inductor compiled, "kernels" what Triton and
FlashAttention 4 did while capturing, "measured" the classes of attention whose kernels were timed. "bytes" is
what the captures take; the start "largest alone" captures the largest budget alone. The start "ready at once"
calls `capture(wait=False)` with empty caches: "done" is seconds from that call to the end of the work behind
it, "longest request" and "median request" are milliseconds of requests of one image meanwhile, every 20 ms,
beside "eager".

`--tiny` takes a tiny tower and 4 budgets, for a machine without a GPU, where nothing is a graph.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
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
_BENCH = Path(__file__).resolve().parents[1] / "bench.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="a tiny tower, on a CPU too")
    parser.add_argument("--tower", default=TOWER, help="of which model, a name of cases/towers.py")
    parser.add_argument("--budgets", type=json.loads, metavar="JSON", help="other token budgets")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS, help="those to make")
    parser.add_argument("--file", help="where the cold start saves it, or an earlier one did")
    parser.add_argument("--in-this-process", metavar="NAME", help="one start; prints its row")
    parser.add_argument("--save", metavar="FILE", help="of one start: save it")
    parser.add_argument("--load", metavar="FILE", help="of one start: begin with what was saved")


@contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds the seconds inside, to the end of the device's work."""
    begin = time.perf_counter()
    yield
    if "import" not in name:
        from timing import synchronize

        synchronize()
    seconds[name] = time.perf_counter() - begin


def start(arguments: argparse.Namespace, budgets: Sequence[int]) -> dict[str, Any]:
    """One start in this process: seconds of each phase, and what the captures take."""
    seconds: dict[str, float] = {}
    with phase("import", seconds):
        make_manager, wrap, own_import = imported()

    import torch

    from fxsplit_encoder.models.random import random_inputs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with phase("tower", seconds):
        tower = wrap(make_tower(arguments, device))
    manager = make_manager(tower, config_of(arguments, budgets))
    with phase("load", seconds):
        if arguments.load is not None and not manager.load_start(arguments.load):
            raise SystemExit(manager.reports[0])
    measurements = manager.kernels.attention.measurements
    known = len(measurements.table(manager.device))
    at_once = arguments.in_this_process == "ready at once"
    with phase("compile", seconds):
        if not at_once:
            manager.compile()
    kernels = count_kernels()
    with phase("capture", seconds):
        manager.capture(wait=not at_once)
    packed = hasattr(tower, "patch_features")
    inputs = random_inputs(tower, [(16 if arguments.tiny else 256) if packed else 1])
    with phase("first embedding", seconds):
        manager.execute(inputs)
    meanwhile = serve_meanwhile(manager, inputs) if at_once else {}
    measured = len(measurements.table(manager.device)) - known
    if arguments.save is not None:
        with phase("save", seconds):
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
    }


def imported() -> tuple[Any, Any, float]:
    """What makes a manager and what wraps a tower, and the seconds that importing this package takes."""
    import torch  # noqa: F401 - which the model's own code needs in any case
    import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

    begin = time.perf_counter()
    import fxsplit_encoder as fx

    return fx.EncoderCudaGraphManager, fx.wrap, time.perf_counter() - begin


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


def serve_meanwhile(manager: Any, request: dict[str, Any]) -> dict[str, Any]:
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

    took: list[float] = []
    while True:
        is_over = manager.wait_captured(0)
        took.append(milliseconds(lambda: manager.execute(request)))
        if is_over:
            break
        time.sleep(0.02)
    progress = manager.stats().progress
    eager = [milliseconds(lambda: manager.tower.encoder_eager_forward(request)) for _ in range(5)]
    return {
        "done": progress.seconds,
        "ended": str(progress),
        "longest request": max(took),
        "median request": statistics.median(took),
        "requests": len(took),
        "eager": statistics.median(eager),
    }


def has_bytecode() -> bool:
    """Whether Python finds its packages compiled, as pip leaves them."""
    import torch

    return Path(importlib.util.cache_from_source(torch.__file__)).exists()


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
    return 0
