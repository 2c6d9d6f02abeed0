"""What budgets would do for a trace: forecasts, the judge of whole ladders, and the proposed tuning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tabulate import tabulate

from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.planning import CostModel, Limits, PathPlan, Plan, build_plan
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH
from fxsplit_encoder.tuning.costs import BatchCosts
from fxsplit_encoder.tuning.trace import Request


@dataclass(frozen=True)
class LadderForecast:
    """What a ladder of budgets would do on the demands of one path."""

    budgets: tuple[int, ...]
    """Output tokens of each budget, increasing."""
    cost: float
    """Of all demands together."""
    padding_fraction: float
    """The share of padding in the output tokens of all replays; 0.0 without replays."""
    hit_fraction: float
    """The share of the demands that are replayed."""

    def row(self) -> tuple[object, ...]:
        """Budgets, graphs, percent of padding and of hits, and cost: a line of a table."""
        percents = (100 * self.padding_fraction, 100 * self.hit_fraction)
        return (", ".join(map(str, self.budgets)), len(self.budgets), *percents, self.cost)


def forecast(budgets: Sequence[int], demands: Sequence[int], costs: BatchCosts) -> LadderForecast:
    """What a ladder does on the demands of a path."""
    ladder, tokens = np.asarray(budgets), np.asarray(demands)
    position = np.searchsorted(ladder, tokens)
    budget = ladder[np.minimum(position, len(ladder) - 1)]
    replay = np.where(position < len(ladder), costs.replay(budget), np.inf)
    exact = costs.exact(tokens)
    hit = replay <= exact
    replayed = int(budget[hit].sum())
    return LadderForecast(
        tuple(map(int, budgets)),
        float(np.minimum(replay, exact).sum()),
        1 - int(tokens[hit].sum()) / replayed if replayed else 0.0,
        float(hit.mean()),
    )


class Judge:
    """Plans the requests of a trace with ladders, by the manager's planner and at given costs.

    Segments and frames limit nothing here: how many a capture holds is known only once it is captured.
    """

    def __init__(
        self, requests: Sequence[Request], packing: Packing, costs: Mapping[str, BatchCosts], max_items: int
    ) -> None:
        self.packing = packing
        self.costs = costs
        self.max_items = max_items
        # Requests of the same sizes are planned once.
        self._counts: Counter[Hashable] = Counter()
        self._requests: dict[Hashable, Request] = {}
        for request in requests:
            sizes = tuple([(i.spec.output_tokens, *i.spec.path_output_tokens.items()) for i in request])
            self._counts[sizes] += 1
            self._requests.setdefault(sizes, request)

    def forecast(self, ladders: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, LadderForecast], float]:
        """What every path's ladder does, and what all batches cost the host in addition.

        Args:
            ladders: the budgets of every path, by the path's name.
        """
        in_ms = all(costs.unit == "ms" for costs in self.costs.values())
        per_batch = HOST_MS_PER_BATCH if in_ms else 0.0
        model = CostModel(
            {(path, ()): self.costs[path].of_ladder(ladder) for path, ladder in ladders.items()}, per_batch
        )
        most_frames = max((sum(item.frames for item in r) for r in self._requests.values()), default=0)
        limits = Limits(ladders, self.max_items, most_frames, frozenset(ladders))
        plans = [
            (build_plan(request, limits, packing=self.packing, costs=model), self._counts[sizes])
            for sizes, request in self._requests.items()
        ]
        num_batches = sum(len(plan.batches) * count for plan, count in plans)
        return {path: _of_path(path, ladders[path], plans) for path in ladders}, num_batches * per_batch


def _of_path(path: str, ladder: tuple[int, ...], plans: Sequence[tuple[Plan, int]]) -> LadderForecast:
    """The forecast of one path from the plans, each with how often it occurs."""
    planned: list[tuple[PathPlan, int]] = [
        (batch.paths[path], count)
        for plan, count in plans
        for batch in plan.batches
        if not batch.paths[path].skipped
    ]
    replays = [(each.tokens, each.budget, count) for each, count in planned if each.budget is not None]
    replayed = sum(budget * count for _, budget, count in replays)
    return LadderForecast(
        ladder,
        sum((each.milliseconds or 0.0) * count for each, count in planned),
        1 - sum(tokens * count for tokens, _, count in replays) / replayed if replayed else 0.0,
        sum(count for *_, count in replays) / sum(count for _, count in planned) if planned else 0.0,
    )


_BUDGETS_COLUMN_WIDTH = 24

# Less is within what predictions are worth.
_WORTH = 0.02


@dataclass(frozen=True)
class PathTuning:
    """The tuned ladder of a path, and what it is compared with."""

    tuned: LadderForecast
    baseline: LadderForecast
    """Of the ladder in use, where that is known; else of the default one, from the smallest to the largest
    demand that a budget may serve."""

    def as_dict(self) -> dict[str, Any]:
        """Both forecasts as plain values that JSON can hold."""
        return {"tuned": asdict(self.tuned), "baseline": asdict(self.baseline)}


@dataclass(frozen=True)
class Tuning:
    """The tuned ladder of every path; printing it shows them as a table."""

    paths: Mapping[str, PathTuning]
    unit: str
    """What costs are counted in."""
    max_items_per_batch: int = 0
    """The items of a batch that the demands were cut for; 0: it is not known."""
    max_bytes: int | None = None
    """The memory limit that the ladders keep; None: none."""
    packing: Packing = "cost"
    """How the manager was taken to pack."""
    host_cost: float = 0.0
    """What the batches of the tuned ladders cost the host in addition; 0.0 where costs are not times."""
    baseline_name: str = "default"
    """Which ladders the tuned ones are compared with: "default", or "current" ones."""
    baseline_host_cost: float = 0.0
    """What the batches of those cost the host."""

    @property
    def cost(self) -> float:
        """Of all demands of all paths, by the tuned ladders, and of the host."""
        return sum(path.tuned.cost for path in self.paths.values()) + self.host_cost

    @property
    def gain(self) -> float:
        """The share of the baseline's cost that the tuned ladders save; negative where they cost more."""
        before = sum(path.baseline.cost for path in self.paths.values()) + self.baseline_host_cost
        return 1 - self.cost / before

    @property
    def advice(self) -> str:
        """Whether the tuned ladders are worth using, in a line."""
        tuned = sum(len(path.tuned.budgets) for path in self.paths.values())
        before = sum(len(path.baseline.budgets) for path in self.paths.values())
        name = f"the {self.baseline_name} ladder ({before} graphs)"
        if self.gain >= _WORTH:
            return f"Use it: predicted to cost {self.gain:.1%} less than {name}."
        if self.gain <= -_WORTH:
            return f"Nothing to gain: {name} is predicted to cost less. Keep it, or allow more graphs."
        if tuned < before:
            return f"Nothing to gain but memory: {name} costs as much; the tuned one has {tuned}."
        return f"Nothing to gain: {name} costs as much. Keep it."

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values that JSON can hold."""
        return {
            "unit": self.unit,
            "packing": self.packing,
            "cost": self.cost,
            "gain": self.gain,
            "advice": self.advice,
            "baseline": self.baseline_name,
            "paths": {name: path.as_dict() for name, path in self.paths.items()},
        }

    @property
    def ladders(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The tuned budgets of every path, with its name."""
        return tuple((name, path.tuned.budgets) for name, path in self.paths.items())

    def to_config(self) -> EncoderConfig:
        """The settings to capture the ladders with."""
        budgets = {name: path.tuned.budgets for name, path in self.paths.items()}
        if budgets.keys() == {"default"}:
            settings: dict[str, object] = {"token_budgets": budgets["default"]}
        else:
            settings = {"paths": {name: {"token_budgets": ladder} for name, ladder in budgets.items()}}
        if self.max_items_per_batch:
            settings["max_items_per_batch"] = self.max_items_per_batch
        if self.max_bytes is not None:
            settings["max_graph_bytes"] = self.max_bytes
        if self.packing != "cost":
            settings["packing"] = self.packing
        return EncoderConfig(**settings)

    def __str__(self) -> str:
        headers = ["path", "ladder", "budgets", "graphs", "padding %", "hit %", "cost", "ratio"]
        rows = [
            [name, label, *ladder.row(), ladder.cost / path.baseline.cost]
            for name, path in self.paths.items()
            for label, ladder in (("tuned", path.tuned), (self.baseline_name, path.baseline))
        ]
        table = tabulate(
            rows,
            headers,
            floatfmt=("", "", "", "", ".1f", ".1f", ".1f", ".3f"),
            maxcolwidths=[None, None, _BUDGETS_COLUMN_WIDTH],
        )
        ratio = f"its ratio to that of the {self.baseline_name} ladder"
        return f"Predicted cost of all batches in {self.unit}, and {ratio}:\n{table}"
