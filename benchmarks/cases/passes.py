"""What graph passes gain, in the vision tower of Qwen3-VL-8B or of another model.

    python benchmarks/bench.py passes --output out/passes.json
    python benchmarks/bench.py passes --tower internvl3-8b --sizes 1 4 12

At its published size, bf16, seeded random weights: milliseconds of one full graph replay of one image at 196,
784, 3136 and 7056 patches, or at other sizes, a row for each candidate: "default", what `passes: auto` is on
CUDA; none; each alone, beside `conv_to_linear`; "default" without each of its passes, and with no attention
that is cut at whole waves. Errors are relative root mean squares against float32 at the smallest size;
"default" has that of bf16. A candidate that fails has its error in the table; the others go on.

`--tiny` takes a tiny tower, on a CPU too, where times are those of `execute`.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from models import captured, rows_of, tiny_tower
from storage import Record, Row, failing
from timing import between_events, wall_ms
from worker import relative_error

import fxsplit_encoder as fx
from fxsplit_encoder.compile.passes import DEFAULT_PASSES
from fxsplit_encoder.config import GRAPH_PASSES
from fxsplit_encoder.models.random import DEMO_MODEL, demo_tower, random_inputs
from fxsplit_encoder.models.registry import architecture

PATCHES = (196, 784, 3136, 7056)
TINY_PATCHES = (16, 64)
_REPLAYS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[""], help="candidates whose names contain one of these")
    parser.add_argument("--tower", default=DEMO_MODEL, help="of which model")
    parser.add_argument(
        "--sizes", nargs="+", type=int, help="patches of an image, or tiles where it has tiles"
    )


def candidates() -> dict[str, dict[str, Any]]:
    """Settings by name."""
    default = DEFAULT_PASSES["cuda"]
    alone = {f"pass {name}": tuple(dict.fromkeys(("conv_to_linear", name))) for name in GRAPH_PASSES}
    without = {f"without {name}": tuple(n for n in default if n != name) for name in default}
    passes = {"default": default, "no passes": (), **alone, **without}
    settings: dict[str, dict[str, Any]] = {name: {"passes": names} for name, names in passes.items()}
    settings["without whole waves"] = {"attention": {"captured, segments=1": "flash_attn_4"}}
    return settings


Batches = Mapping[int, tuple[dict[str, Any], int]]
"""Inputs of one image by its size, and how many tokens they make."""


def measure(settings: dict[str, Any], tower: Any, batches: Batches, exact: Any) -> Row:
    """Milliseconds at every size, and the error at the smallest."""
    # By cost the exact shape may win, where what is timed is the replay.
    items = 1 if isinstance(exact.adapter, fx.PackedTower) else max(batches)
    limits = {"max_items_per_batch": items, "max_frames_per_batch": 1, "mode": "full", "packing": "greedy"}
    budgets = tuple(tokens for _, tokens in batches.values())
    row: Row = {}
    manager = captured(fx.wrap(copy.deepcopy(tower)), token_budgets=budgets, **limits, **settings)
    if manager.reports:
        raise RuntimeError("; ".join(manager.reports))
    for size, (inputs, _) in batches.items():
        outputs = manager.execute(inputs)
        if size == min(batches):
            row["error"] = relative_error(rows_of(outputs), rows_of(exact(inputs)))
        is_cpu = manager.device.type == "cpu"
        execute = functools.partial(manager.execute, inputs)
        row[str(size)] = wall_ms(execute) if is_cpu else replay_ms(manager, inputs)
    manager.clear()
    return row


def replay_ms(manager: fx.EncoderCudaGraphManager, inputs: dict[str, Any]) -> float:
    """Device time in milliseconds of the graphs that one image replays, one of each path."""
    (planned,) = manager.plan(inputs).batches
    found = [manager.paths[n].captured.get(p.budget) for n, p in planned.paths.items() if not p.skipped]
    if None in found:
        raise RuntimeError(f"it was not replayed: {planned}")
    replays = [(each.for_one_segment or each).replay for each in found]
    return sum(median(between_events(replay) for _ in range(_REPLAYS)) for replay in replays)


def batches_of(wrapped: Any, sizes: Sequence[int]) -> Batches:
    """One image of each size."""
    batches = {}
    for size in sizes:
        inputs = random_inputs(wrapped, [size])
        (spec,) = wrapped.get_encoder_cudagraph_item_specs(inputs)
        batches[size] = inputs, spec.output_tokens
    return batches


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    tiny, device = arguments.tiny, arguments.device
    tower = tiny_tower() if tiny else demo_tower(None, device, torch.bfloat16, model=arguments.tower)
    tower = tower.to(device, torch.bfloat16)
    family = architecture(arguments.tower).family
    exact = family.eager_tower(copy.deepcopy(tower).float())
    sizes = arguments.sizes or (TINY_PATCHES if tiny else PATCHES)
    batches = batches_of(family.wrap(copy.deepcopy(tower)), sizes)
    unit = "patches" if isinstance(exact.adapter, fx.PackedTower) else "tiles"
    record.settings.update(tower="tiny" if tiny else arguments.tower, patches=list(sizes), unit=unit)
    for name, settings in candidates().items():
        if any(part in name for part in arguments.only):
            row: Row = {"candidate": name}
            with failing(row):
                row |= measure(settings, tower, batches, exact)
            record(row)
            torch._dynamo.reset()
