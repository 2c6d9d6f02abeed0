"""What a request costs the CPU: `execute` for one image, planning, the attention op, `torch.compile`.

    python benchmarks/bench.py host --output out/host.json

27 blocks of the Qwen3-VL-8B vision tower, bf16, one image, `full` graphs, three small budgets. Microseconds
of the CPU, device work not awaited, medians. "execute": an image of a known size; "launch": that of its graph
alone; "plan of": images that have not come before. "torch.compile": a call behind the backend, its guards
included; "module guards skipped": `options={"guard_filter_fn": skip_guard_on_all_nn_modules_unsafe}`; "a look
a second": `options={"weight_check_seconds": 1}`. "attention op": `fxsplit::varlen_attention` pinned to
torch's kernel, beyond a call of that. `--tiny` times a tiny tower's own work too.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import random
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from models import captured, tiny_tower
from storage import Record
from timing import host_us, in_turns, timed
from torch.compiler import skip_guard_on_all_nn_modules_unsafe
from workloads import random_grid

import fxsplit_encoder as fx
from fxsplit_encoder.kernels.attention import KernelChooser, varlen_attention
from fxsplit_encoder.kernels.attention.chooser import choosing
from fxsplit_encoder.models.random import demo_tower

LIMITS = {"token_budgets": (64, 128, 256), "max_items_per_batch": 16}
_WARMUPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=300, help="timed calls of a row")


def image(tower: Any, height: int, width: int) -> dict[str, Any]:
    pixels = torch.randn(height * width, tower.patch_features, device=tower.device, dtype=tower.dtype)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def executes(tower: Any, samples: int) -> Iterator[tuple[str, float]]:
    """`execute` in full graphs and in piecewise ones."""
    inputs = image(tower, 16, 16)
    for mode, name in (("full", "execute"), ("piecewise", "execute, piecewise")):
        manager = captured(tower, **LIMITS, max_frames_per_batch=0, mode=mode)
        call = functools.partial(manager.execute, inputs)
        yield name, host_us(call, samples, _WARMUPS)
        if mode == "full":
            (graph,) = (path.captured[LIMITS["token_budgets"][0]].capture for path in manager.paths.values())
            yield "launch", host_us(graph.replay, samples, _WARMUPS)
            yield "execute, new sizes", new_sizes(manager, tower)
            yield from plans(manager, samples)
        manager.clear()


def new_sizes(manager: fx.EncoderCudaGraphManager, tower: Any) -> float:
    """Of `execute` for images that are each of another size."""
    sizes = [(2 * h, 2 * w) for h, w in itertools.product(range(2, 17), repeat=2) if 100 < h * w <= 256]
    requests = [image(tower, *size) for size in sizes]
    return 1e3 * statistics.median(timed(lambda r=each: manager.execute(r))[1] for each in requests)


def plans(manager: fx.EncoderCudaGraphManager, samples: int) -> Iterator[tuple[str, float]]:
    generator = random.Random(1)
    for count in (1, 32, 256):
        times = []
        for _ in range(max(1, samples // 3)):
            grids = torch.tensor([random_grid(generator) for _ in range(count)])
            times.append(timed(lambda g=grids: manager.plan({"image_grid_thw": g}))[1])
        yield f"plan of {count}", 1e3 * statistics.median(times)


def attention_op(device: str, samples: int) -> float:
    """Of the op beyond its kernel's call."""
    query, key, value = torch.randn(64, 3, 16, 72, device=device, dtype=torch.bfloat16).unbind(1)
    lengths = torch.tensor([0, 64], dtype=torch.int32, device=device)
    kernel = torch.ops.aten._flash_attention_forward.default
    alone = host_us(
        lambda: kernel(query, key, value, lengths, lengths, 64, 64, 0.0, False, False, scale=0.1), samples
    )
    with choosing(KernelChooser("torch_flash")):
        return host_us(lambda: varlen_attention(query, key, value, lengths, 64, 0.1), samples) - alone


def compiled(tower: Any, samples: int) -> Iterator[tuple[str, float]]:
    """The tower behind `torch.compile`."""
    inputs = image(tower, 16, 16)
    settings: dict[str, dict[str, Any]] = {
        "": {},
        ", module guards skipped": {"guard_filter_fn": skip_guard_on_all_nn_modules_unsafe},
        ", a look a second": {"weight_check_seconds": 1.0},
    }
    calls = {}
    for name, more in settings.items():
        options = {**LIMITS, "mode": "full", **more}
        module = torch.compile(copy.deepcopy(tower), backend="encoder_cg", fullgraph=True, options=options)
        fx.warmup(module)
        calls[name] = functools.partial(module, inputs["pixel_values"], inputs["image_grid_thw"])
    # In turns: what the host does besides changes over seconds, by more than they differ.
    for name, times in in_turns(calls, samples, min(samples, _WARMUPS)).items():
        yield f"torch.compile{name}", 1e3 * statistics.median(host for _, host in times)


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    tiny, device = arguments.tiny, arguments.device
    tower = fx.wrap(tiny_tower().to(device) if tiny else demo_tower(27, device, torch.bfloat16))
    record.settings.update(tower="tiny" if tiny else "qwen3-vl-8b", **LIMITS)
    measured = [executes(tower, arguments.samples), compiled(tower, arguments.samples)]
    if device == "cuda":
        measured.append(iter([("attention op", attention_op(device, arguments.samples))]))
    for what, microseconds in itertools.chain(*measured):
        record({"what": what, "us": microseconds})
