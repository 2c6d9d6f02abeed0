"""`encoder-cg demo`: photographs and a clip, through the manager, compared with eager."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fxsplit_encoder as fx
from fxsplit_encoder.cli.compare import ERROR_RATIO_TOLERANCE, FLOAT32_TOLERANCE, Comparer, Comparison
from fxsplit_encoder.cli.console import (
    Update,
    describe_device,
    describe_replay,
    describe_split,
    describe_tower,
    print_facts,
    print_table,
    progress_bars,
    repository_path,
)
from fxsplit_encoder.models.eager import as_tensors, share_weights
from fxsplit_encoder.models.family import Family
from fxsplit_encoder.models.prepare import EncoderInputs, ProcessorSettings, find_files, load_inputs
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.models.registry import architecture
from fxsplit_encoder.towers.dense import DenseTower

_CPU_BLOCKS = 2
# Tiles of the budgets, where no configuration is given; on a CPU every tile takes seconds.
_TILES = {"cpu": (1, 2, 5), "cuda": (1, 2, 4, 8, 16)}
_WHOLE_VIEWS = {"cpu": (1, 2), "cuda": (1, 2, 4, 8)}


def run_demo(
    images: Sequence[Path],
    config: fx.EncoderConfig | None,
    blocks: int | None,
    device: torch.device,
    dtype: torch.dtype,
    model: str,
) -> bool:
    """Encode every file alone and all of them together, and print the comparison.

    Args:
        images: images, clips, and directories of them; none: those in examples/ that the model takes.
        config: budgets and how they are captured; None: configs/demo.yaml, for a tower of tiles a few tiles.
        blocks: the tower's depth; None: all of it on CUDA, a few blocks on a CPU.
        device: where both towers run.
        dtype: of the weights and the pixels.
        model: whose tower, a name of `models.registry.ARCHITECTURES`.

    Returns:
        Whether every output is within tolerance of eager's.

    Raises:
        InputError: a file is not usable.
    """
    known = architecture(model)
    if config is None and known.family.unit == "patches":
        config = fx.EncoderConfig.from_yaml(repository_path("configs/demo.yaml", "--config YAML"))
    preparation = known.family.prepare(known.settings(blocks), ProcessorSettings())
    if not images:
        kinds = ("images", "videos") if preparation.takes_clips else ("images",)
        images = [repository_path(f"examples/{kind}", "--images PATH") for kind in kinds]
    inputs = load_inputs(find_files(images), preparation).to(device, dtype)
    depth = blocks or (None if device.type == "cuda" else _CPU_BLOCKS)
    tower = demo_tower(depth, device, dtype, model=model)
    wrapped = known.family.wrap(share_weights(tower))
    config = config or _tile_budgets(wrapped, device)
    print_facts(
        {
            "tower": f"{known.title}'s, random weights, {describe_tower(tower)}",
            "device": describe_device(device),
            "replays": describe_replay(device, config),
        }
    )
    comparer = _comparer(known.family, tower, wrapped, config)
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
    _print_comparisons(manager, inputs, known.family.unit, comparisons)
    print(f"\nWhat the manager served, all runs together\n{manager.stats()}\n")
    return _verdict(inputs, comparisons)


def _tile_budgets(wrapped: Any, device: torch.device) -> fx.EncoderConfig:
    """Budgets of a few whole tiles, of each path its own."""
    tiles, whole = _TILES[device.type], _WHOLE_VIEWS[device.type]
    if isinstance(wrapped, DenseTower):
        return fx.EncoderConfig(token_budgets=tuple(n * wrapped.tokens_per_tile for n in tiles))
    counts = {"global": whole, "local": tiles}
    return fx.EncoderConfig(
        max_items_per_batch=whole[-1],
        paths={
            path: {"token_budgets": tuple(n * view.tokens for n in counts[path])}
            for path, view in wrapped.views.items()
        },
    )


def _comparer(family: Family, tower: Any, wrapped: Any, config: fx.EncoderConfig) -> Comparer:
    is_short = next(tower.parameters()).dtype != torch.float32
    exact = family.eager_tower(copy.deepcopy(tower).float()) if is_short else None
    eager = family.eager_tower(tower)
    return Comparer(fx.EncoderCudaGraphManager(wrapped, config), eager, exact)


def _compare_all(comparer: Comparer, inputs: EncoderInputs, update: Update) -> list[Comparison]:
    """Every item alone, then the whole batch."""
    select = comparer.eager.adapter.select_encoder_cudagraph_items
    singles = [as_tensors(select(inputs.mm_kwargs, [index])) for index in range(len(inputs.items))]
    # The first calls of a process are slower than all after them.
    comparer.compare(singles[0])
    comparisons: list[Comparison] = []
    batches = [*singles, inputs.mm_kwargs]
    for batch in batches:
        update(len(comparisons), len(batches))
        comparisons.append(comparer.compare(batch))
    update(len(batches), len(batches))
    return comparisons


def _print_comparisons(
    manager: fx.EncoderCudaGraphManager, inputs: EncoderInputs, unit: str, comparisons: Sequence[Comparison]
) -> None:
    tokens = [s.output_tokens for s in manager.tower.get_encoder_cudagraph_item_specs(inputs.mm_kwargs)]
    rows: list[list[object]] = [
        [_stem(item.key), item.pixels, item.size, count, *_served(manager, comparison)]
        for item, count, comparison in zip(inputs.items, tokens, comparisons, strict=False)
    ]
    plan = comparisons[-1].plan
    rows.append([f"all {plan.num_items}", "", "", sum(tokens), "", "", f"{plan.hits} of {plan.num_items}"])
    print("Each item alone, then all in one batch; milliseconds, and the largest difference from eager")
    headers = ["item", "size px", unit, "tokens", "budget", "mode", "served"]
    headers += ["eager", "ours", "ratio", "|diff|"]
    print_table(headers, [[*row, *_measured(c)] for row, c in zip(rows, comparisons, strict=True)])


def _stem(key: str) -> str:
    """A key without the file's extension: `clip.webp[1]` is `clip[1]`."""
    name, bracket, part = key.partition("[")
    return f"{Path(name).stem}{bracket}{part}"


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
