"""Every tower at its published size: errors and times against eager, seconds to compile and capture, memory.

    export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
    python benchmarks/towers.py --compile-only --models qwen3-vl-8b &
    python benchmarks/towers.py --compile-only --models internvl3-8b & wait
    python benchmarks/towers.py --models qwen3-vl-8b internvl3-8b --output a.json
    python benchmarks/towers.py --merge a.json b.json --output benchmarks/results/towers_h200.json

1. `--compile-only` makes each tower's manager, compiles it and stores nothing: several such processes beside
   one another fill Inductor's cache. The first run of a kernel also chooses its launch by time, and that is
   cached too, so let each have a GPU of its own where there are several. This step may be left out.
2. The timed run, alone on its GPU. It stores how many pieces came from the cache, and where its seconds went.
3. Results of several runs are joined; `documents.py` writes the table in docs/towers.md.

Full depth, bf16, seeded random weights, mode `auto`, the tower's configuration in configs/. Sizes are patches
of packed towers, tiles of towers of equal tiles, and crops of those that also see the image as a whole.

* Errors are those of `manager.execute` against the same tower in float32, without TF32 and image by image, as
  multiples of eager's own: of the root mean square, which may be 1.1 at most, and of the largest difference,
  which is that of a single value and varies. Free memory and the graphs' pool are full of NaN beforehand.
* Times are medians in milliseconds after warm-up, wall time to the end of the device's work. "eager" is the
  model's own forward in transformers (sdpa); Kimi-VL, DeepSeek-OCR and Step3 are not in transformers, theirs
  is the eager forward of the model in this library.

Timed runs may share a host, a GPU each (CUDA_VISIBLE_DEVICES). The file is written after each tower; one that
fails leaves its traceback there, and the exit code is 1.
"""

from __future__ import annotations

import copy
import gc
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from environment import describe
from phases import Phases
from poison import poison
from storage import load, make_parser, store
from tables.towers import figures
from timing import synchronize, wall_ms

import fxsplit_encoder as fx
from fxsplit_encoder.models.eager import as_tensors, max_error, rms_error, share_weights
from fxsplit_encoder.models.random import demo_tower, random_inputs
from fxsplit_encoder.models.registry import architecture
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.tiled import TiledTower

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "qwen2-vl-7b": "qwen2_vl_7b",
    "qwen2.5-vl-7b": "qwen2_5_vl_7b",
    "qwen3-vl-8b": "qwen3_vl_8b",
    "qwen3.5-9b": "qwen3_5_9b",
    "glm-4.1v-9b": "glm_4_1v_9b",
    "kimi-vl-a3b": "kimi_vl",
    "kimi-k2.5": "kimi_k25",
    "internvl3-8b": "internvl3_8b",
    "internvl3-38b": "internvl3_38b",
    "llama4": "llama4",
    "siglip-so400m-384": None,
    "clip-l-336": None,
    "dinov2-l-518": None,
    "deepseek-ocr": "deepseek_ocr",
    "step3-vl": None,
    "step3p7": None,
}
"""Towers, and their configuration in configs/; None: what is inferred."""

ALLOWED_ERROR = 1.1
ALLOWED_TIME = 1.05
_REPEATS, _WARMUPS = 15, 4
_CACHE_ANSWERS = ("hit", "miss", "bypass")


def cases(wrapped: Any, name: str, small: bool) -> dict[str, list[int]]:
    """The sizes of the images of every batch."""
    if isinstance(wrapped, PackedTower):
        single = (256, 1024, 7056)
        batch = [256, 576, 1024, 144, 784, 2304, 400, 1600]
        tiny = (16, 64)
    elif isinstance(wrapped, TiledTower):
        single = (0, 4, 9)
        batch = [0, 2, 4, 0, 6, 9, 0, 2]
        tiny = (0, 1)
    else:
        single = (1, 4, 16 if name == "llama4" else 12)
        batch = [1, 2, 5, 1, 7, 3, 1, 4]
        tiny = (1, 2)
    if small:
        return {"small": [tiny[0]], "batch of 8": list(tiny)}
    singles = {case: [size] for case, size in zip(("small", "medium", "large"), single, strict=True)}
    return {**singles, "batch of 8": batch}


def chosen_config(name: str, small: bool) -> fx.EncoderConfig:
    """The configuration in configs/, or the inferred one."""
    file = MODELS.get(name)
    if small:
        return fx.EncoderConfig(mode="none")
    return fx.EncoderConfig() if file is None else fx.EncoderConfig.from_yaml(ROOT / f"configs/{file}.yaml")


class Bench:
    """One tower: eager in bf16 and in float32, and captured."""

    def __init__(self, name: str, device: str, small: bool) -> None:
        self.family = architecture(name).family
        self.name, self.small = name, small
        # In bf16 a CPU takes minutes.
        dtype, blocks = (torch.float32, 1) if small else (torch.bfloat16, None)
        self.tower = demo_tower(blocks, device, dtype, model=name)
        self.wrapped = self.family.wrap(share_weights(self.tower))
        self.eager = self.family.eager_tower(self.tower)
        self.batches = {
            case: (sizes, random_inputs(self.wrapped, sizes, seed))
            for seed, (case, sizes) in enumerate(cases(self.wrapped, name, small).items())
        }

    def references(self) -> dict[str, list[torch.Tensor]]:
        """Every batch in float32, image by image; the float32 copy is released afterwards."""
        wider = torch.float64 if self.small else torch.float32
        exact = self.family.eager_tower(copy.deepcopy(self.tower).to(wider))
        select = exact.adapter.select_encoder_cudagraph_items
        return {
            case: [exact(as_tensors(select(inputs, [index])))[0] for index in range(len(sizes))]
            for case, (sizes, inputs) in self.batches.items()
        }

    def compile(self, phase: Phases) -> tuple[fx.EncoderCudaGraphManager, dict[str, int]]:
        """The tower's manager, compiled, and how many distinct pieces that took: all, and from the cache."""
        before = _cache_counts()
        with phase("compile"):
            config = chosen_config(self.name, self.small)
            manager = fx.EncoderCudaGraphManager(self.wrapped, config, log_interval=0)
            manager.compile()
            synchronize()
        counts = _cache_counts() - before
        return manager, {"pieces": counts.total(), "cached pieces": counts["fxgraph_cache_hit"]}

    def run(self, phase: Phases) -> dict[str, Any]:
        """What is stored of this tower."""
        with phase("references"):
            references = self.references()
            release()
        manager, pieces = self.compile(phase)
        with phase("capture"):
            manager.capture()
            synchronize()
        with phase("cases"):
            cases = [self._case(manager, case, references.pop(case)) for case in self.batches]
        result: dict[str, Any] = {
            "parameters": sum(parameter.numel() for parameter in self.tower.parameters()),
            "config": manager.config.model_dump(mode="json", exclude_unset=True),
            **pieces,
            "capture bytes": manager.num_bytes,
            "programs": {path: _program(bound) for path, bound in manager.programs.items()},
            "captured": {
                path: {budget: graph.mode for budget, graph in graphs.items()}
                for path, graphs in manager.budget_graphs.items()
            },
            "reports": manager.reports,
            "cases": cases,
        }
        manager.clear()
        wrong = [case["case"] for case in result["cases"] if case["rms error"] > ALLOWED_ERROR]
        if wrong:
            result["failure"] = f"the error is more than {ALLOWED_ERROR} times eager's: {', '.join(wrong)}"
        return result

    def _case(self, manager: Any, case: str, reference: list[torch.Tensor]) -> dict[str, Any]:
        sizes, inputs = self.batches[case]
        if torch.cuda.is_available():
            poison(manager.pool)
        ours, eager = manager.execute(inputs), self.eager(inputs)
        plan = manager.plan(inputs)
        errors = {
            "rms error": rms_error(ours, reference) / rms_error(eager, reference),
            "max error": max_error(ours, reference) / max_error(eager, reference),
        }
        del ours, eager
        repeats, warmups = (1, 0) if self.small else (_REPEATS, _WARMUPS)
        forward, module = self.family.eager, self.tower
        if forward is None:
            eager_ms = wall_ms(lambda: self.eager(inputs), repeats, warmups)
        else:
            eager_ms = wall_ms(lambda: forward(module, inputs), repeats, warmups)
        ours_ms = wall_ms(lambda: manager.execute(inputs), repeats, warmups)
        return {
            "case": case,
            "sizes": sizes,
            "eager ms": eager_ms,
            "ours ms": ours_ms,
            "eager / ours": eager_ms / ours_ms,
            "slower than eager": ours_ms > ALLOWED_TIME * eager_ms,
            **errors,
            "plan": [
                {path: path_plan.budget or "exact" for path, path_plan in batch.paths.items()}
                for batch in plan.batches
            ],
        }


def _cache_counts() -> Counter[str]:
    """What Inductor's cache of graphs has answered so far in this process."""
    counts = torch._dynamo.utils.counters["inductor"]
    return Counter({f"fxgraph_cache_{kind}": counts[f"fxgraph_cache_{kind}"] for kind in _CACHE_ANSWERS})


def _program(bound: Any) -> dict[str, Any] | None:
    if bound is None:
        return None
    program = bound.program
    return {
        "pieces": len(program.pieces),
        "distinct": program.num_distinct,
        "padding": str(program.padding),
    }


def release() -> None:
    """Gives back what no tensor holds any more."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_model(name: str, device: str, small: bool, compile_only: bool = False) -> dict[str, Any]:
    """What is stored of a tower; of one that fails, its traceback; and the seconds of every phase."""
    phase = Phases()
    try:
        with phase("build"):
            bench = Bench(name, device, small)
            synchronize()
        result = bench.compile(phase)[1] if compile_only else bench.run(phase)
    except Exception:
        result = {"failure": traceback.format_exc()}
    return {**result, "seconds": dict(phase.seconds)}


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """The results of several runs as one. Each model keeps the commit that it was measured at.

    Raises:
        ValueError: they were not made on the same GPU with the same versions.
    """
    results = [load(file) for file in files]
    machines = [{k: v for k, v in result.items() if k not in ("models", "commit")} for result in results]
    if different := [str(file) for file, e in zip(files, machines, strict=True) if e != machines[0]]:
        raise ValueError(f"{', '.join(different)}: other GPU or versions than {files[0]}")
    models: dict[str, Any] = {}
    for result in results:
        models |= {name: {"commit": result["commit"], **model} for name, model in result["models"].items()}
    known = {name: models.pop(name) for name in MODELS if name in models}
    commits = dict.fromkeys(model["commit"] for model in (*known.values(), *models.values()))
    return {**machines[0], "commit": ", ".join(commits), "models": {**known, **models}}


def progress(name: str, model: dict[str, Any]) -> str:
    """Where the seconds of a tower went, and its pieces came from."""
    seconds: dict[str, float] = model["seconds"]
    parts = ", ".join(f"{phase} {taken:.1f}" for phase, taken in seconds.items())
    pieces = f"; {model['cached pieces']} of {model['pieces']} pieces cached" if "pieces" in model else ""
    return f"{name}: {sum(seconds.values()):.0f} s ({parts}{pieces})"


def report(result: dict[str, Any], table: bool = True) -> int:
    """Prints the table and what failed; the exit code."""
    if table:
        print(figures(result, "simple"))
    failures = {name: model["failure"] for name, model in result["models"].items() if "failure" in model}
    for name, failure in failures.items():
        print(f"\n{name}: {failure}")
    return 1 if failures else 0


@torch.no_grad()
def run_models(
    names: Sequence[str], output: Path | None, small: bool, compile_only: bool = False
) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    result: dict[str, Any] = {**describe(), "models": {}}
    for name in names:
        model = run_model(name, "cpu" if small else "cuda", small, compile_only)
        result["models"][name] = model
        store(output, result)
        release()
        print(progress(name, model), flush=True)
    return result


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--small", action="store_true", help="one block and tiny inputs, on the CPU")
    parser.add_argument("--compile-only", action="store_true", help="fill Inductor's cache, store nothing")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="join results of earlier runs")
    arguments = parser.parse_args()
    if arguments.merge is not None:
        result = merge(arguments.merge)
        store(arguments.output, result)
        return report(result)
    if not (torch.cuda.is_available() or arguments.small):
        parser.exit(2, "towers.py needs a CUDA device, or --small: there is nothing to capture without one\n")
    compile_only = arguments.compile_only
    output = None if compile_only else arguments.output
    result = run_models(arguments.models, output, arguments.small, compile_only)
    return report(result, table=not compile_only)


if __name__ == "__main__":
    raise SystemExit(main())
