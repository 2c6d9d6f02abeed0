"""One image through the Qwen3-VL-8B vision tower: every mode against Hugging Face eager and its CUDA graph.

    python benchmarks/single_image.py --output benchmarks/results/single_image_h200.json

27 blocks, 1152 wide, bf16, seeded random weights. Times are medians in milliseconds after warm-up, in one
process on one GPU:

* "HF eager": the Hugging Face tower as it is (sdpa), wall time.
* "FA2 graph": one CUDA graph of the eager model at the exact shape, with torch's FlashAttention 2 called once
  a layer.
* "full", "piecewise": replays of our captures at the budget of exactly this size. "none": wall time of our
  compiled pieces at the exact shape, not captured.
* "execute", "compiled": wall time of `manager.execute` (mode `auto`) and of
  `torch.compile(tower, backend="encoder_cg")` (mode `full`), with host metadata, copies and, for the second,
  Dynamo's guards.

Errors are root mean squares of the difference from the same tower in float32, relative to that of eager in
bf16. Inductor's cache is empty at the start, so the seconds of the first mode are those of a cold start.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch
from environment import describe
from tabulate import tabulate
from timing import cpu_ms, gpu_ms, wall_ms
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.cli.models import demo_tower

PATCHES = (64, 256, 784, 1024, 3136, 4096, 7056)
LIMITS = {
    "token_budgets": (16, 64, 196, 256, 784, 1024, 1764),
    "max_items_per_batch": 8,
    "max_frames_per_batch": 8,
}


def grid_of(patches: int) -> torch.Tensor:
    """The most square grid of so many patches."""
    side = int(patches**0.5)
    while patches % side or side % 2 or (patches // side) % 2:
        side -= 1
    return torch.tensor([[1, side, patches // side]])


def graph_of_eager(tower: Any, pixels: torch.Tensor, grid: torch.Tensor) -> Callable[[], None]:
    """One CUDA graph of the eager model at one shape: what a user captures by hand."""
    batch = {"pixel_values": pixels, "image_grid_thw": grid}
    prepared = tower.prepare_encoder_cudagraph_replay_buffers(batch, 0, 0)
    inputs = {name: value.cuda() for name, value in prepared.values.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            tower.encoder_cudagraph_forward(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tower.encoder_cudagraph_forward(inputs)
    return graph.replay


def rms(difference: torch.Tensor) -> float:
    return difference.float().square().mean().sqrt().item()


def packed(output: Any) -> torch.Tensor:
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


def capture_all(tower: Any) -> tuple[dict[str, fx.EncoderCudaGraphManager], dict[str, dict[str, float]]]:
    """A captured manager for every mode, and the seconds that it took; the first one starts cold."""
    managers, seconds = {}, {}
    for mode in ("full", "piecewise", "none", "auto"):
        config = fx.EncoderConfig(**LIMITS, mode=mode)
        start = time.perf_counter()
        managers[mode] = fx.EncoderCudaGraphManager(tower, config)
        managers[mode].compile()
        compiled = time.perf_counter()
        managers[mode].capture()
        torch.cuda.synchronize()
        seconds[mode] = {"compile": compiled - start, "capture": time.perf_counter() - compiled}
    return managers, seconds


def measure(patches: int, hf: Any, exact: Any, tower: Any, compiled: Any, managers: Any) -> dict[str, Any]:
    """One row of the table."""
    grid = grid_of(patches)
    on_device = grid.cuda()
    pixels = torch.randn(patches, tower.patch_features, device="cuda").bfloat16()
    inputs = {"pixel_values": pixels, "image_grid_thw": grid}
    row: dict[str, Any] = {"patches": patches, "HF eager": wall_ms(lambda: hf(pixels, on_device), 15)}
    row["FA2 graph"] = gpu_ms(graph_of_eager(tower, pixels, grid))
    reference = packed(exact(pixels.float(), on_device))
    eager_error = rms(packed(hf(pixels, on_device)) - reference)
    for mode, manager in managers.items():
        row[f"{mode} error"] = rms(manager.execute(inputs)[0] - reference) / eager_error
        path = manager.paths["default"]
        if mode in ("full", "piecewise"):
            captured = path.ladder.best(patches // 4, 1)
            row[mode] = gpu_ms(captured.replay)
            row[f"{mode} cpu"] = cpu_ms(captured.replay)
        elif mode == "none":
            row[mode] = wall_ms(partial(manager.execute, inputs))
    row["execute"] = wall_ms(lambda: managers["auto"].execute(inputs))
    chosen = managers["auto"].budget_graphs["default"].get(patches // 4)
    row["auto chose"] = chosen.mode if chosen is not None else "exact shape"
    row["compiled"] = wall_ms(lambda: compiled(pixels, grid))
    row["HF eager / execute"] = row["HF eager"] / row["execute"]
    row["FA2 graph / full"] = row["FA2 graph"] / row["full"]
    row["piecewise / full"] = row["piecewise"] / row["full"]
    return row


@torch.no_grad()
def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "single_image.py needs a CUDA device: there is nothing to capture without one\n")
    torch.manual_seed(0)
    hf: Qwen3VLVisionModel = demo_tower(27, "cuda", torch.bfloat16)
    exact = copy.deepcopy(hf).float()
    tower = fx.wrap(copy.deepcopy(hf))
    managers, seconds = capture_all(tower)
    options = {**LIMITS, "mode": "full"}
    compiled = torch.compile(tower, backend="encoder_cg", fullgraph=True, options=options)
    rows = [measure(patches, hf, exact, tower, compiled, managers) for patches in PATCHES]

    times = ["patches", "HF eager", "FA2 graph", "full", "piecewise", "none", "execute", "compiled"]
    ratios = ["patches", "auto chose", "HF eager / execute", "FA2 graph / full", "piecewise / full"]
    ratios += ["full cpu", "piecewise cpu", *(f"{mode} error" for mode in managers)]
    for columns in (times, ratios):
        print(tabulate([[row[c] for c in columns] for row in rows], columns, floatfmt=".3f"), "\n")
    for mode, taken in seconds.items():
        print(f"{mode}: {taken['compile']:.1f} s to compile, {taken['capture']:.1f} s to capture")
    if arguments.output is not None:
        result = {**describe(), "tower": "Qwen3-VL-8B vision, 27 blocks, bf16, random weights", **LIMITS}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**result, "seconds": seconds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
