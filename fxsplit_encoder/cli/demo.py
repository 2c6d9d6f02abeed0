"""One tower twice, eager and through the manager: outputs, how far apart they are, and on a GPU times."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.capture.forward import measure_ms
from fxsplit_encoder.cli.console import (
    Update,
    describe_device,
    describe_replay,
    describe_split,
    describe_tower,
    progress_bars,
)
from fxsplit_encoder.cli.document import Column, Document, columns
from fxsplit_encoder.cli.files import shipped
from fxsplit_encoder.cli.tower import ChosenTower
from fxsplit_encoder.models.eager import EagerTower, as_tensors, max_error, rms_error, share_weights
from fxsplit_encoder.models.family import Family
from fxsplit_encoder.models.prepare import EncoderInputs, Preparation, find_files, load_inputs
from fxsplit_encoder.planning.plan import Plan
from fxsplit_encoder.towers.tiles import DenseTower

FLOAT32_TOLERANCE = 1e-4
"""The largest difference of a value from eager's, in float32."""

ERROR_RATIO_TOLERANCE = 1.1
"""In shorter dtypes: the largest error against float32, as a multiple of eager's own."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of one batch."""

    plan: Plan
    times: tuple[float, float] | None
    """Milliseconds of eager and of ours; None: on a CPU, where they would say nothing."""

    difference: float
    """The largest, against eager in the same dtype."""

    error_ratio: float | None
    """Root mean square error against float32 as a multiple of eager's own; None: the dtype is float32."""

    @property
    def problem(self) -> str | None:
        """Returns which output is out of tolerance; None: none is."""
        if self.error_ratio is None:
            if self.difference <= FLOAT32_TOLERANCE:
                return None
            return f"differs from eager by {self.difference:.1e}; allowed: {FLOAT32_TOLERANCE:.0e}"
        if self.error_ratio <= ERROR_RATIO_TOLERANCE:
            return None
        return f"has {self.error_ratio:.2f} times eager's error; allowed: {ERROR_RATIO_TOLERANCE} times"


class Comparer:
    """Encodes batches both ways."""

    def __init__(
        self, manager: fx.EncoderCudaGraphManager, eager: EagerTower, reference: EagerTower | None
    ) -> None:
        self.manager = manager
        self.eager = eager
        self.reference = reference
        self.device: torch.device = manager.device

    def compare(self, mm_kwargs: dict[str, Any]) -> Comparison:
        """Encode a batch both ways, and take times on a GPU."""
        expected, ours = self.eager(mm_kwargs), self.manager.execute(mm_kwargs)
        times = None
        if self.device.type == "cuda":
            times = (
                measure_ms(lambda: self.eager(mm_kwargs), self.device),
                measure_ms(lambda: self.manager.execute(mm_kwargs), self.device),
            )
        return Comparison(
            self.manager.plan(mm_kwargs),
            times,
            max_error(ours, expected),
            None if self.reference is None else error_ratio(ours, expected, self.reference(mm_kwargs)),
        )


def error_ratio(ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Our root mean square error as a multiple of eager's own."""
    return rms_error(ours, exact) / rms_error(eager, exact)


CPU_BLOCKS = 2
"""The depth of a tower with random weights on a CPU."""

# Tiles of the budgets, where no configuration is given; on a CPU every tile takes seconds.
_TILES = {"cpu": (1, 2, 5), "cuda": (1, 2, 4, 8, 16)}
_WHOLE_VIEWS = {"cpu": (1, 2), "cuda": (1, 2, 4, 8)}


def run_demo(
    chosen: ChosenTower, images: Sequence[Path], config: fx.EncoderConfig | None, document: Document
) -> bool:
    """Encode every file alone and all of them together, and compare.

    Args:
        chosen: whose tower; on a GPU both ways to run it are timed.
        images: images, clips, and directories of them; none: the examples that the model takes.
        config: budgets and how they are captured; None: configs/demo.yaml, for a tower of tiles a few tiles.
        document: where it says what it finds.

    Returns:
        Whether every output is within tolerance of eager's.

    Raises:
        InputError: a file is not usable.
    """
    inputs = load_inputs(find_files(images or example_images(chosen.preparation)), chosen.preparation)
    tower, family = chosen.module, chosen.family
    parameter = next(tower.parameters())
    device = parameter.device
    inputs = inputs.to(device, parameter.dtype)
    wrapped = family.wrap(share_weights(tower))
    if config is None and family.unit == "patches":
        config = fx.EncoderConfig.from_yaml(shipped("configs/demo.yaml"))
    config = config or _tile_budgets(wrapped, device)
    document.facts(
        {
            "tower": f"{chosen.title}, {describe_tower(tower)}",
            "device": describe_device(device),
            "replays": describe_replay(device, config),
        }
    )
    comparer = _comparer(family, tower, wrapped, config)
    manager = comparer.manager
    with progress_bars() as bar:
        manager.compile(progress=bar("compiling"))
        manager.capture(progress=bar("capturing"))
        comparisons = _compare_all(comparer, inputs, bar("encoding"))
    for path, program in manager.programs.items():
        document.facts({"split": describe_split(path, program)}, within=("programs", path))
    document.notes(manager.reports)
    plan = manager.plan(inputs.mm_kwargs)
    document.put("plan", plan.as_dict(), f"\nThe plan for the whole batch\n{plan}\n")
    _say_comparisons(document, manager, inputs, family.unit, comparisons)
    stats = manager.stats()
    document.put("stats", stats.as_dict(), f"\nWhat the manager served, all runs together\n{stats}\n")
    return _verdict(inputs, comparisons, document)


def example_images(preparation: Preparation) -> list[Path]:
    """The photographs that come with the package, and the clip, if a model takes any."""
    kinds = ("images", "videos") if preparation.takes_clips else ("images",)
    return [shipped(f"examples/{kind}") for kind in kinds]


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
    comparisons: list[Comparison] = []
    batches = [*singles, inputs.mm_kwargs]
    for batch in batches:
        update(len(comparisons), len(batches))
        comparisons.append(comparer.compare(batch))
    update(len(batches), len(batches))
    return comparisons


def _say_comparisons(
    document: Document,
    manager: fx.EncoderCudaGraphManager,
    inputs: EncoderInputs,
    unit: str,
    comparisons: Sequence[Comparison],
) -> None:
    tokens = [s.output_tokens for s in manager.tower.get_encoder_cudagraph_item_specs(inputs.mm_kwargs)]
    rows: list[list[object]] = [
        [_stem(item.key), item.pixels, item.size, count, *_served(manager, comparison)]
        for item, count, comparison in zip(inputs.items, tokens, comparisons, strict=False)
    ]
    plan = comparisons[-1].plan
    rows.append([f"all {plan.num_items}", None, None, sum(tokens), *(None, None)])
    rows[-1].append(f"{plan.hits} of {plan.num_items}")
    is_timed = comparisons[-1].times is not None
    what = "milliseconds, and the largest" if is_timed else "and the largest"
    document.say(f"Each item alone, then all in one batch; {what} difference from eager")
    headers = [
        *columns(item="item", size="size px", **{unit: unit}, tokens="tokens"),
        *columns(budget="budget", mode="mode", served="served"),
        *(_TIMES if is_timed else ()),
        Column("difference", "|diff|", "{:.0e}".format),
    ]
    document.table("items", headers, [[*r, *_measured(c)] for r, c in zip(rows, comparisons, strict=True)])


def _stem(key: str) -> str:
    """A key without the file's extension: `clip.webp[1]` is `clip[1]`, and `photo.png#2` `photo#2`."""
    return re.sub(r"\.\w+(?=$|#\d|\[\d)", "", key)


def _served(manager: fx.EncoderCudaGraphManager, comparison: Comparison) -> list[object]:
    """Budget, mode, and hit or the reason of a miss, of an item encoded alone."""
    batches = comparison.plan.batches
    paths = [(name, path) for batch in batches for name, path in batch.paths.items() if path.tokens]
    replayed = [(name, path.budget) for name, path in paths if path.budget is not None]
    modes = [manager.budget_graphs[name][budget].mode for name, budget in replayed]
    budgets = [str(budget) for _, budget in replayed]
    reason = next((path.reason for _, path in paths if path.reason), None)
    return ["+".join(budgets) or "-", "+".join(modes) or "-", str(reason or "hit")]


def _milliseconds(value: float) -> str:
    return f"{value:.{0 if value >= 1000 else 2}f}"


_TIMES = (
    Column("eager_ms", "eager", _milliseconds),
    Column("ours_ms", "ours", _milliseconds),
    Column("ratio", "ratio", "{:.2f}".format),
)


def _measured(comparison: Comparison) -> list[float]:
    """On a GPU eager's time and ours and their ratio; and the largest difference."""
    if comparison.times is None:
        return [comparison.difference]
    eager, ours = comparison.times
    return [eager, ours, eager / ours, comparison.difference]


def _verdict(inputs: EncoderInputs, comparisons: Sequence[Comparison], document: Document) -> bool:
    names = [*(item.key for item in inputs.items), "the whole batch"]
    problems = [f"{n} {c.problem}" for n, c in zip(names, comparisons, strict=True) if c.problem]
    for problem in problems:
        print(f"encoder-cg: FAILED: {problem}", file=sys.stderr)
    text = "\n".join(problems) or _praise(comparisons)
    document.content["verdict"] = text
    if not problems:
        document.say(text)
    return not problems


def _praise(comparisons: Sequence[Comparison]) -> str:
    ratios = [c.error_ratio for c in comparisons if c.error_ratio is not None]
    if not ratios:
        return f"Every output is within {FLOAT32_TOLERANCE:.0e} of eager's."
    worst, allowed = max(ratios), ERROR_RATIO_TOLERANCE
    return (
        f"Every output's error against float32 is at most {worst:.2f} times eager's own (allowed: {allowed})."
    )
