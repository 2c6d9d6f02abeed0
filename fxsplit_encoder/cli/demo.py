"""One tower twice, eager and through the manager: outputs, how far apart they are, and on a GPU times."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fxsplit_encoder as fx
from fxsplit_encoder.capture.forward import measure_ms
from fxsplit_encoder.cli.console import capture, describe_replay, describe_split, progress_bars, say_tower
from fxsplit_encoder.cli.document import Document, shipped
from fxsplit_encoder.cli.tower import Batch, ChosenTower
from fxsplit_encoder.models.eager import EagerTower, max_error, rms_error, share_weights
from fxsplit_encoder.planning.plan import Plan
from fxsplit_encoder.towers.tiles import DenseTower

CPU_BLOCKS = 2
"""The depth of a tower with random weights on a CPU."""

FLOAT32_TOLERANCE = 1e-4
"""The largest difference of a value from eager's, in float32."""

ERROR_RATIO_TOLERANCE = 1.1
"""In shorter dtypes: the largest error against float32, as a multiple of eager's own."""

# Tiles of the budgets, where no configuration is given; on a CPU every tile takes seconds.
_TILES = {"cpu": (1, 2, 5), "cuda": (1, 2, 4, 8, 16)}
_WHOLE_VIEWS = {"cpu": (1, 2), "cuda": (1, 2, 4, 8)}


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
            found = f"differs from eager by {self.difference:.1e}; allowed: {FLOAT32_TOLERANCE:.0e}"
            return None if self.difference <= FLOAT32_TOLERANCE else found
        found = f"has {self.error_ratio:.2f} times eager's error; allowed: {ERROR_RATIO_TOLERANCE} times"
        return None if self.error_ratio <= ERROR_RATIO_TOLERANCE else found


def run_demo(
    chosen: ChosenTower, images: Sequence[Path], config: fx.EncoderConfig | None, document: Document
) -> bool:
    """Encodes every file alone and all of them together, both ways; returns whether every output is
    within tolerance of eager's. InputError: a file is not usable.

    Args:
        images: images, clips, and directories of them; none: the examples that the model takes.
        config: budgets and how they are captured; None: configs/demo.yaml, for a tower of tiles a few tiles.
    """
    inputs = chosen.inputs(images)
    tower, family = chosen.module, chosen.family
    wrapped = family.wrap(share_weights(tower))
    if config is None and isinstance(wrapped, fx.PackedTower):
        config = fx.EncoderConfig.from_yaml(shipped("configs/demo.yaml"))
    config = config or _tile_budgets(wrapped, chosen.device)
    say_tower(document, chosen)
    document.facts({"replays": describe_replay(chosen.device, config)})
    exact = None if chosen.dtype == torch.float32 else family.eager_tower(copy.deepcopy(tower).float())
    eager = family.eager_tower(tower)
    manager = fx.EncoderCudaGraphManager(wrapped, config)
    capture(manager)
    batches = chosen.batches(inputs, range(len(inputs.items)))
    comparisons = []
    with progress_bars() as bar:
        update = bar("encoding")
        for number, batch in enumerate(batches, start=1):
            comparisons.append(_compare(manager, eager, exact, batch.mm_kwargs))
            update(number, len(batches))
    for path, program in manager.programs.items():
        document.facts({"split": describe_split(path, program)}, within=("programs", path))
    document.notes(manager.reports)
    plan = comparisons[-1].plan
    document.put("plan", plan.as_dict(), f"\nThe plan for the whole batch\n{plan}\n")
    _say_comparisons(document, manager, batches, comparisons)
    stats = manager.stats()
    document.put("stats", stats.as_dict(), f"\nWhat the manager served, all runs together\n{stats}\n")
    return _verdict(batches, comparisons, document)


def _compare(
    manager: fx.EncoderCudaGraphManager,
    eager: EagerTower,
    exact: EagerTower | None,
    mm_kwargs: dict[str, Any],
) -> Comparison:
    """Encodes a batch both ways, and in float32 where `exact` is given; takes times on a GPU."""
    expected, ours = eager(mm_kwargs), manager.execute(mm_kwargs)
    times, device = None, manager.device
    if device.type == "cuda":
        times = (
            measure_ms(lambda: eager(mm_kwargs), device),
            measure_ms(lambda: manager.execute(mm_kwargs), device),
        )
    ratio = None
    if exact is not None:
        right = exact(mm_kwargs)
        ratio = rms_error(ours, right) / rms_error(expected, right)
    return Comparison(manager.plan(mm_kwargs), times, max_error(ours, expected), ratio)


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


def _say_comparisons(
    document: Document,
    manager: fx.EncoderCudaGraphManager,
    batches: Sequence[Batch],
    comparisons: Sequence[Comparison],
) -> None:
    rows = []
    for batch, comparison in zip(batches, comparisons, strict=True):
        row = {**batch.row, **_served(manager, comparison.plan)}
        if comparison.times is not None:
            eager, ours = comparison.times
            row.update(eager_ms=eager, ours_ms=ours, ratio=eager / ours)
        rows.append({**row, "difference": comparison.difference})
    plan = comparisons[-1].plan
    rows[-1].update(budget=None, mode=None, served=f"{plan.hits} of {plan.num_items}")
    what = "and the largest" if comparisons[-1].times is None else "milliseconds, and the largest"
    document.say(f"Each item alone, then all in one batch; {what} difference from eager")
    headers = {"size": "size px", "eager_ms": "eager", "ours_ms": "ours", "difference": "|diff|"}
    formats = {"eager_ms": _milliseconds, "ours_ms": _milliseconds, "ratio": "{:.2f}".format}
    document.table("items", rows, headers, {**formats, "difference": "{:.0e}".format})


def _served(manager: fx.EncoderCudaGraphManager, plan: Plan) -> dict[str, str]:
    """Budget, mode, and hit or the reason of a miss, of an item encoded alone."""
    paths = [(name, path) for batch in plan.batches for name, path in batch.paths.items() if path.tokens]
    replayed = [(name, path.budget) for name, path in paths if path.budget is not None]
    modes = [manager.budget_graphs[name][budget].mode for name, budget in replayed]
    budgets = [str(budget) for _, budget in replayed]
    reason = next((path.reason for _, path in paths if path.reason), None)
    served = str(reason or "hit")
    return {"budget": "+".join(budgets) or "-", "mode": "+".join(modes) or "-", "served": served}


def _milliseconds(value: float) -> str:
    return f"{value:.{0 if value >= 1000 else 2}f}"


def _verdict(batches: Sequence[Batch], comparisons: Sequence[Comparison], document: Document) -> bool:
    names = [*(batch.row["item"] for batch in batches[:-1]), "the whole batch"]
    problems = [f"{n} {c.problem}" for n, c in zip(names, comparisons, strict=True) if c.problem]
    for problem in problems:
        print(f"encoder-cg: FAILED: {problem}", file=sys.stderr)
    if problems:
        document.content["verdict"] = "\n".join(problems)
        return False
    praise = f"Every output is within {FLOAT32_TOLERANCE:.0e} of eager's."
    if ratios := [c.error_ratio for c in comparisons if c.error_ratio is not None]:
        worst = f"at most {max(ratios):.2f} times eager's own (allowed: {ERROR_RATIO_TOLERANCE})"
        praise = f"Every output's error against float32 is {worst}."
    document.put("verdict", praise, praise)
    return True
