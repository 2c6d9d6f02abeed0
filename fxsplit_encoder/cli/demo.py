"""`encoder-cg demo`: photographs and a clip, through the manager and beside eager."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import fxsplit_encoder as fx
from fxsplit_encoder.cli.architectures import architecture
from fxsplit_encoder.cli.compare import ERROR_RATIO_TOLERANCE, FLOAT32_TOLERANCE, Comparer, Comparison
from fxsplit_encoder.cli.console import (
    Update,
    describe_device,
    describe_replay,
    print_facts,
    print_table,
    progress_bars,
)
from fxsplit_encoder.cli.describe import describe_split, describe_tower
from fxsplit_encoder.cli.inputs import EncoderInputs, find_files, load_inputs
from fxsplit_encoder.cli.models import DEMO_MODEL, demo_config, demo_tower
from fxsplit_encoder.cli.patches import IMAGE_FORMAT, VIDEO_FORMAT

_CPU_BLOCKS = 2
_HEADERS = ["item", "size px", "patches", "tokens", "budget", "mode", "served"]
_HEADERS += ["eager", "ours", "ratio", "|diff|"]


def run_demo(
    images: Sequence[Path],
    config: fx.EncoderConfig,
    blocks: int | None,
    device: torch.device,
    dtype: torch.dtype,
    model: str = DEMO_MODEL,
) -> bool:
    """Encode every file alone and all of them together, and print the comparison.

    Args:
        images: images, clips, and directories of them.
        config: budgets and how they are captured.
        blocks: the tower's depth; None: all of it on CUDA, a few blocks on a CPU.
        device: where both towers run.
        dtype: of the weights and the patches.
        model: whose tower, a name of `cli.architectures.ARCHITECTURES`.

    Returns:
        Whether every output is within tolerance of eager's.

    Raises:
        InputError: a file is not usable.
    """
    patch_size = demo_config(blocks, model).patch_size
    formats = (replace(form, patch_size=patch_size) for form in (IMAGE_FORMAT, VIDEO_FORMAT))
    inputs = load_inputs(find_files(images), *formats).to(device, dtype)
    depth = blocks or (None if device.type == "cuda" else _CPU_BLOCKS)
    tower = demo_tower(depth, device, dtype, model=model)
    print_facts(
        {
            "tower": f"{architecture(model).title}'s, random weights, {describe_tower(tower)}",
            "device": describe_device(device),
            "replays": describe_replay(device, config),
        }
    )
    comparer = _comparer(tower, config)
    manager = comparer.manager
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling"))
        manager.capture(progress=bar("capturing"))
        comparisons = _compare_all(comparer, inputs, bar("encoding"))
    for path, program in manager.programs.items():
        print_facts({"split": describe_split(path, program)})
    for report in manager.reports:
        print_facts({"note": report})
    print(f"\nThe plan for the whole batch\n{manager.plan(inputs.mm_kwargs)}\n")
    _print_comparisons(manager, inputs, comparisons)
    print(f"\nWhat the manager served, all runs together\n{manager.stats()}\n")
    return _verdict(inputs, comparisons)


def _comparer(tower: torch.nn.Module, config: fx.EncoderConfig) -> Comparer:
    # The copy shares the weights and nothing else, so it keeps the attention that it came with.
    eager = copy.deepcopy(tower, {id(parameter): parameter for parameter in tower.parameters()})
    is_short = next(tower.parameters()).dtype != torch.float32
    reference = copy.deepcopy(tower).float() if is_short else None
    return Comparer(fx.EncoderCudaGraphManager(fx.wrap(tower), config), eager, reference)


def _compare_all(comparer: Comparer, inputs: EncoderInputs, update: Update) -> list[Comparison]:
    """Every item alone, then the whole batch."""
    singles = [inputs.select(index) for index in range(len(inputs.items))]
    # The first calls of a process are slower than all after them.
    comparer.compare(min(singles, key=lambda single: single.items[0].patches))
    comparisons: list[Comparison] = []
    batches = [*singles, inputs]
    for batch in batches:
        update(len(comparisons), len(batches))
        comparisons.append(comparer.compare(batch))
    update(len(batches), len(batches))
    return comparisons


def _print_comparisons(
    manager: fx.EncoderCudaGraphManager, inputs: EncoderInputs, comparisons: Sequence[Comparison]
) -> None:
    rows = [
        [Path(item.key).stem, item.pixels, item.patches, item.tokens, *_served(manager, comparison)]
        for item, comparison in zip(inputs.items, comparisons, strict=False)
    ]
    patches, tokens = (sum(getattr(item, name) for item in inputs.items) for name in ("patches", "tokens"))
    plan = comparisons[-1].plan
    rows.append([f"all {plan.num_items}", "", patches, tokens, "", "", f"{plan.hits} of {plan.num_items}"])
    print("Each item alone, then all in one batch; milliseconds, and the largest difference from eager")
    print_table(_HEADERS, [[*row, *_measured(c)] for row, c in zip(rows, comparisons, strict=True)])


def _served(manager: fx.EncoderCudaGraphManager, comparison: Comparison) -> list[object]:
    """Budget, mode, and hit or the reason of a miss, of an item encoded alone."""
    batches = comparison.plan.batches
    paths = [(name, path) for batch in batches for name, path in batch.paths.items() if path.tokens]
    replayed = [(name, path.budget) for name, path in paths if path.budget is not None]
    modes = [manager.budget_graphs[name][budget].mode for name, budget in replayed]
    budgets = [str(budget) for _, budget in replayed]
    reason = next((path.reason for _, path in paths if path.reason), None)
    return ["+".join(budgets) or "-", "+".join(modes) or "-", str(reason or "hit")]


def _measured(comparison: Comparison) -> list[str]:
    """Eager's time and ours, their ratio, and the largest difference."""
    times = (comparison.eager_ms, comparison.ours_ms)
    decimals = 0 if max(times) >= 1000 else 2
    ratio = comparison.eager_ms / comparison.ours_ms
    return [*(f"{ms:.{decimals}f}" for ms in times), f"{ratio:.2f}", f"{comparison.difference:.0e}"]


def _verdict(inputs: EncoderInputs, comparisons: Sequence[Comparison]) -> bool:
    names = [*(item.key for item in inputs.items), "the whole batch"]
    problems = [f"{n} {c.problem}" for n, c in zip(names, comparisons, strict=True) if c.problem]
    for problem in problems:
        print(f"encoder-cg: FAILED: {problem}", file=sys.stderr)
    if not problems:
        print(_praise(comparisons))
    return not problems


def _praise(comparisons: Sequence[Comparison]) -> str:
    ratios = [c.error_ratio for c in comparisons if c.error_ratio is not None]
    if not ratios:
        return f"Every output is within {FLOAT32_TOLERANCE:.0e} of eager's."
    worst, allowed = max(ratios), ERROR_RATIO_TOLERANCE
    return (
        f"Every output's error against float32 is at most {worst:.2f} times eager's own (allowed: {allowed})."
    )
