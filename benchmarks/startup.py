"""Where the time of a start goes: each phase of a cold start and of a second one, in processes of their own.

    python benchmarks/startup.py --output benchmarks/results/startup_h200.json

The Qwen3-VL-8B vision tower, 27 blocks, bf16, random weights, 16 budgets, mode `full`. `--small` takes narrow
blocks and 4 budgets, for a machine without a GPU, where nothing is a graph and pieces run as traced. The cold
start has an empty Inductor cache, the second one what the first left there. Seconds:

* "import": torch, transformers and this package. "tower": making the tower, which a server does by reading
  its checkpoint; it is not part of the total.
* "trace", "pieces", "first run": `manager.compile`, where "pieces" is the compilation of the distinct pieces
  and "first run" the one in which the program's arguments are told apart.
* "capture": `manager.capture`. "first embedding": the first `manager.execute`.

"bytes" is what the ladder holds; a third process captures its largest budget alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from phases import Phases
from storage import make_parser, store

BUDGETS = (16, 32, 48, 64, 96, 128, 196, 256, 324, 400, 512, 784, 1024, 1296, 1764, 2304)
SMALL_BUDGETS = (4, 16, 32, 64)
LIMITS = {"mode": "full", "max_items_per_batch": 4, "max_frames_per_batch": 8}
PHASES = ("import", "trace", "pieces", "first run", "capture", "first embedding")


def start(small: bool, budgets: Sequence[int]) -> dict[str, Any]:
    """One start in this process: seconds a phase, and what it made."""
    phase = Phases()
    seconds = phase.seconds
    with phase("import"):
        import torch
        from narrow_tower import narrow_tower

        import fxsplit_encoder as fx
        from fxsplit_encoder.compile.pieces import piece_compiler
        from fxsplit_encoder.models.random import demo_tower

    def synchronise() -> None:
        if not small:
            torch.cuda.synchronize()

    device = torch.device("cpu" if small else "cuda")
    compiler = piece_compiler("auto", device)

    def compile_piece(module: Any, inputs: Any) -> Any:
        with phase("pieces"):
            return compiler(module, inputs)

    with phase("tower"):
        made = narrow_tower(27, (8, 16, 24)) if small else demo_tower(27, "cuda", torch.bfloat16)
        tower = fx.wrap(made)
        synchronise()
    config = fx.EncoderConfig(**LIMITS, token_budgets=tuple(budgets), piece_compiler=compile_piece)
    manager = fx.EncoderCudaGraphManager(tower, config)
    reached: list[float] = []
    with phase("compile"):
        manager.compile(lambda done, total: reached.append(time.perf_counter()))
        synchronise()
        seconds["first run"] = time.perf_counter() - reached[-1]
    seconds["trace"] = seconds["compile"] - seconds["pieces"] - seconds["first run"]
    with phase("capture"):
        manager.capture()
        synchronise()
    side = 4 if small else 16
    pixels = torch.randn(side * side, tower.patch_features, device=device)
    with phase("first embedding"):
        manager.execute({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])})
        synchronise()
    inductor = torch._dynamo.utils.counters["inductor"]
    program = manager.programs["default"].program
    return {
        "seconds": {name: seconds[name] for name in (*PHASES, "tower")},
        "pieces": len(program.pieces),
        "distinct": program.num_distinct,
        "cached": inductor["fxgraph_cache_hit"],
        "captured": len(manager.budget_graphs["default"]),
        "bytes": manager.num_bytes,
    }


def in_new_process(small: bool, budgets: Sequence[int], cache: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--start", json.dumps(budgets), *(["--small"] if small else [])]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    seconds = result["seconds"]
    seconds["total"] = sum(seconds[name] for name in PHASES)
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--small", action="store_true", help="narrow blocks, on the CPU")
    parser.add_argument("--budgets", type=int, nargs="+", help="other token budgets than the ladder's")
    parser.add_argument("--start", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        print(json.dumps(start(arguments.small, arguments.start)))
        return
    from environment import describe
    from tables.startup import phases, sentences

    budgets = arguments.budgets or (SMALL_BUDGETS if arguments.small else BUDGETS)
    tower = f"Qwen3-VL vision, 27 blocks, {'narrow' if arguments.small else '8B, bf16'}, random weights"
    starts: dict[str, Any] = {}
    result = {**describe(), "tower": tower, **LIMITS, "token_budgets": budgets, "starts": starts}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "second"):
            starts[name] = in_new_process(arguments.small, budgets, cache)
            store(arguments.output, result)
        largest = in_new_process(arguments.small, (max(budgets),), cache)
    ratio = starts["second"]["bytes"] / largest["bytes"]
    result |= {"largest alone": largest, "memory ratio": ratio}
    print(phases(result, "simple"), "\n")
    print(sentences(result))
    store(arguments.output, result)


if __name__ == "__main__":
    main()
