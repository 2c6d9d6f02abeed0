"""Where the time of a start goes: each phase of a cold start and of a second one, in processes of their own.

    python benchmarks/bench.py start --output out/start.json

The Qwen3-VL-8B vision tower, 27 blocks, bf16, random weights, 16 budgets, mode `full`. `--tiny` takes a tiny
tower and 4 budgets, for a machine without a GPU, where nothing is a graph and pieces run as traced. The cold
start has empty caches, the second one what the first left there. Seconds:

* "import": torch, transformers and this package. "tower": making the tower, which a server does by reading
  its checkpoint; it is not part of the total.
* "compile", "capture": those methods of the manager. "first embedding": the first `execute`.

"bytes" is what the captures take; the start "largest alone" captures the largest budget and no other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUDGETS = (16, 32, 48, 64, 96, 128, 196, 256, 324, 400, 512, 784, 1024, 1296, 1764, 2304)
TINY_BUDGETS = (4, 16, 32, 64)
LIMITS = {"mode": "full", "max_items_per_batch": 4, "max_frames_per_batch": 8}
PHASES = ("import", "compile", "capture", "first embedding")
_BENCH = Path(__file__).resolve().parents[1] / "bench.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="a tiny tower, on a CPU too")
    parser.add_argument("--budgets", type=json.loads, metavar="JSON", help="other token budgets")
    parser.add_argument("--in-this-process", action="store_true", help="one start; prints its row")


def start(tiny: bool, budgets: Sequence[int]) -> dict[str, Any]:
    """One start in this process: seconds of each phase, and what the captures take."""
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if name != "import":
            synchronize()
        seconds[name] = time.perf_counter() - begin

    with phase("import"):
        import torch
        from models import tiny_tower
        from timing import synchronize

        import fxsplit_encoder as fx
        from fxsplit_encoder.models.random import demo_tower

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with phase("tower"):
        made = tiny_tower().to(device) if tiny else demo_tower(27, device, torch.bfloat16)
        tower = fx.wrap(made)
    manager = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(**LIMITS, token_budgets=tuple(budgets)))
    with phase("compile"):
        manager.compile()
    with phase("capture"):
        manager.capture()
    side = 4 if tiny else 16
    pixels = torch.randn(side * side, tower.patch_features, device=device)
    with phase("first embedding"):
        manager.execute({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])})
    total = sum(seconds[name] for name in PHASES)
    captured = len(manager.budget_graphs["default"])
    return {**seconds, "total": total, "captured": captured, "bytes": manager.num_bytes}


def in_new_process(tiny: bool, budgets: Sequence[int], caches: str) -> dict[str, Any]:
    options = ["--in-this-process", "--budgets", json.dumps(budgets), *(["--tiny"] if tiny else [])]
    folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "cache"}
    environment = {**os.environ, **{name: f"{caches}/{folder}" for name, folder in folders.items()}}
    command = [sys.executable, str(_BENCH), "start", *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def run(arguments: argparse.Namespace) -> int:
    tiny = arguments.tiny
    budgets = arguments.budgets or (TINY_BUDGETS if tiny else BUDGETS)
    if arguments.in_this_process:
        print(json.dumps(start(tiny, budgets)))
        return 0
    from storage import new_result, store
    from tables import starts

    tower = "tiny" if tiny else "qwen3-vl-8b"
    result = new_result("start", tower=tower, **LIMITS, token_budgets=list(budgets))
    with tempfile.TemporaryDirectory() as caches:
        for name, its_budgets in (("cold", budgets), ("second", budgets), ("largest alone", [max(budgets)])):
            result["rows"].append({"start": name, **in_new_process(tiny, its_budgets, caches)})
            store(arguments.output, result)
    print(starts(result))
    return 0
