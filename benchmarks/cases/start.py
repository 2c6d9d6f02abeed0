"""Where the time of a start goes: each phase of a cold start, and of one from the file that it saved, each in
a process of its own.

    python benchmarks/bench.py start --output out/start.json

The Qwen3-VL-8B vision tower, 27 blocks, bf16, random weights, 16 budgets, mode `full`. Caches are empty.
Where packages lie without bytecode, which the table says, every process compiles what it imports:
`gpu_host.sh bytecode` does that before. Seconds:

* "import": torch, transformers and this package. "tower": making the tower, which is not part of the
  total, as "save" (`save_start`) is not.
* "load": `load_start`. "compile", "capture": those methods of the manager. "first embedding": the first
  `execute`.

"bytes" is what the captures take. The start "ready at once" calls `capture(wait=False)`: "done" is seconds
from that call to the end of the work behind it, "longest request" and "median request" are milliseconds of
requests of one image meanwhile, every 20 ms, beside "eager".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage import ROOT, Record, Row, environment

BUDGETS = (16, 32, 48, 64, 96, 128, 196, 256, 324, 400, 512, 784, 1024, 1296, 1764, 2304)
TINY_BUDGETS = (4, 16)
LIMITS = {"mode": "full", "max_items_per_batch": 4, "max_frames_per_batch": 8}
PHASES = ("import", "load", "compile", "capture", "first embedding")
COLD, FROM_FILE, AT_ONCE = STARTS = ("cold", "from file", "ready at once")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS, help="those to make, in order")


@contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds the seconds inside, to the end of the device's work."""
    begin = time.perf_counter()
    yield
    if "import" not in name:
        from timing import synchronize

        synchronize()
    seconds[name] = time.perf_counter() - begin


def start(name: str, tiny: bool, file: str) -> None:
    """One start in this process: prints seconds of each phase, and what the captures take."""
    seconds: dict[str, float] = {}
    with phase("import", seconds):
        import torch
        import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401 - which the model needs in any case

        import fxsplit_encoder as fx

    from models import tiny_tower

    from fxsplit_encoder.models.random import demo_tower, random_inputs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with phase("tower", seconds):
        tower = fx.wrap(tiny_tower().to(device) if tiny else demo_tower(None, device, torch.bfloat16))
    config = fx.EncoderConfig(**LIMITS, token_budgets=TINY_BUDGETS if tiny else BUDGETS)
    manager = fx.EncoderCudaGraphManager(tower, config, log_interval=0)
    with phase("load", seconds):
        if name == FROM_FILE and not manager.load_start(file):
            raise SystemExit(manager.reports[0])
    with phase("compile", seconds):
        if name != AT_ONCE:
            manager.compile()
    with phase("capture", seconds):
        manager.capture(wait=name != AT_ONCE)
    inputs = random_inputs(tower, [16 if tiny else 256])
    with phase("first embedding", seconds):
        manager.execute(inputs)
    meanwhile = serve_meanwhile(manager, inputs) if name == AT_ONCE else {}
    if name == COLD:
        with phase("save", seconds):
            seconds["file bytes"] = manager.save_start(file)
    row = {
        **seconds,
        **meanwhile,
        "total": sum(seconds[each] for each in PHASES),
        "captured": sum(map(len, manager.budget_graphs.values())),
        "bytes": manager.num_bytes,
    }
    print(json.dumps(row))


def serve_meanwhile(manager: Any, request: dict[str, Any]) -> Row:
    """Requests until everything is captured: how long they took beside eager's, and how long that took.

    A request waits for its own stream, as who copies its outputs does, and not for what else the device does.
    """
    import torch

    def milliseconds(call: Callable[[], Any]) -> float:
        times = []
        for each in (lambda: None, call):
            each()
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter())
        return (times[1] - times[0]) * 1e3

    took: list[float] = []
    while True:
        is_over = manager.wait_captured(0)
        took.append(milliseconds(lambda: manager.execute(request)))
        if is_over:
            break
        time.sleep(0.02)
    eager = [milliseconds(lambda: manager.tower.encoder_eager_forward(request)) for _ in range(5)]
    return {
        "done": manager.stats().progress.seconds,
        "longest request": max(took),
        "median request": statistics.median(took),
        "requests": len(took),
        "eager": statistics.median(eager),
    }


def in_new_process(name: str, tiny: bool, folder: str) -> Row:
    given = environment(ROOT / "benchmarks", Path(folder) / name)
    program = f"from cases.start import start; start({name!r}, {tiny}, {f'{folder}/saved.start'!r})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def run(arguments: argparse.Namespace, record: Record) -> None:
    import torch

    tiny = arguments.tiny
    bytecode = Path(importlib.util.cache_from_source(torch.__file__)).exists()  # as pip leaves it
    budgets = list(TINY_BUDGETS if tiny else BUDGETS)
    record.settings.update(tower="tiny" if tiny else "qwen3-vl-8b", **LIMITS, token_budgets=budgets)
    record.settings["bytecode"] = bytecode
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.starts:
            record({"start": name, **in_new_process(name, tiny, folder)})
