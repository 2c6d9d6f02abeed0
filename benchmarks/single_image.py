"""One image through the Qwen3-VL-8B vision tower: every mode against Hugging Face eager and its CUDA graph.

    python benchmarks/single_image.py --output benchmarks/results/single_image_h200.json

27 blocks, 1152 wide, bf16, seeded random weights. Times are medians after warm-up, in one process on one GPU:

* "HF eager": the Hugging Face tower as it is (sdpa).
* "FA2 graph": one CUDA graph of the eager model at the exact shape, with torch's FlashAttention 2 called once a layer.
* "full", "piecewise": the replay of our capture. "none": our compiled pieces at the exact shape, not captured.
* "execute": `manager.execute`, wall time, with its host work and the copy of the result.

Errors are the largest absolute difference from the same tower in float32, relative to its largest output.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import describe
from tabulate import tabulate
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.cli.models import demo_tower

PATCHES = (64, 256, 784, 1024, 3136, 4096, 7056)
BUDGETS = (16, 64, 196, 256, 784, 1024, 1764)


def gpu_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds between events around a call."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def wall_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds of a call up to the end of its device work."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def cpu_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds that a call keeps the CPU, its device work not awaited."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def grid_of(patches: int) -> torch.Tensor:
    """The most square grid of so many patches."""
    side = int(patches**0.5)
    while patches % side or side % 2 or (patches // side) % 2:
        side -= 1
    return torch.tensor([[1, side, patches // side]])


def graph_of_eager(tower: Any, pixels: torch.Tensor, grid: torch.Tensor) -> Callable[[], None]:
    """One CUDA graph of the eager model at one shape: what a user captures by hand."""
    values = tower.prepare_encoder_cudagraph_replay_buffers({"pixel_values": pixels, "image_grid_thw": grid}, 0, 0).values
    inputs = {name: value.cuda() for name, value in values.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            tower.encoder_cudagraph_forward(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tower.encoder_cudagraph_forward(inputs)
    return graph.replay


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return ((output.float() - reference).abs().max() / reference.abs().max()).item()


def packed(output: Any) -> torch.Tensor:
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    hf: Qwen3VLVisionModel = demo_tower(27, "cuda", torch.bfloat16)
    reference_tower = copy.deepcopy(hf).float()
    ours = copy.deepcopy(hf)
    tower = fx.wrap(ours)

    managers, seconds = {}, {}
    for mode in ("full", "piecewise", "none", "auto"):
        start = time.perf_counter()
        config = fx.EncoderConfig(mode=mode, token_budgets=BUDGETS, max_items_per_batch=4, max_frames_per_batch=4)
        managers[mode] = fx.EncoderCudaGraphManager(tower, config)
        managers[mode].compile()
        compiled = time.perf_counter()
        managers[mode].capture()
        torch.cuda.synchronize()
        seconds[mode] = {"compile": compiled - start, "capture": time.perf_counter() - compiled}

    rows = []
    for patches in PATCHES:
        grid = grid_of(patches)
        pixels = torch.randn(patches, tower.patch_features, device="cuda").bfloat16()
        inputs = {"pixel_values": pixels, "image_grid_thw": grid}
        reference = packed(reference_tower(pixels.float(), grid.cuda()))
        eager = packed(hf(pixels, grid.cuda()))
        row: dict[str, Any] = {"patches": patches, "HF eager": wall_ms(lambda: hf(pixels, grid.cuda()), 10)}
        row["FA2 graph"] = gpu_ms(graph_of_eager(tower, pixels, grid))
        errors = {"HF eager": relative_error(eager, reference)}
        for mode, manager in managers.items():
            output = manager.execute(inputs)[0]
            errors[mode] = relative_error(output, reference)
            captured = manager.paths["default"].captured.get(patches // 4)
            if captured is not None and mode != "auto":
                row[mode] = gpu_ms(captured.replay)
                row[f"{mode} cpu"] = cpu_ms(captured.replay)
            elif mode == "none":
                row[mode] = gpu_ms(lambda: manager.execute(inputs))
            row[f"execute {mode}"] = wall_ms(lambda: manager.execute(inputs))
        modes = {m: g.mode for m, g in managers["auto"].budget_graphs["default"].items()}
        row["auto chose"] = modes.get(patches // 4, "exact shape")
        row["FA2 graph / full"] = row["FA2 graph"] / row["full"]
        row["errors"] = errors
        rows.append(row)

    shown = ["patches", "HF eager", "FA2 graph", "full", "piecewise", "none", "execute full", "execute auto", "auto chose"]
    print(tabulate([[row.get(k) for k in shown] + [row["FA2 graph / full"]] for row in rows], [*shown, "FA2 graph / full"], floatfmt=".3f"))
    print(tabulate([[r["patches"], r["full cpu"], r["piecewise cpu"]] + list(r["errors"].values()) for r in rows],
                   ["patches", "full cpu", "piecewise cpu", *(f"err {k}" for k in rows[0]["errors"])], floatfmt=".4f"))
    print(seconds)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**describe(), "seconds": seconds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
