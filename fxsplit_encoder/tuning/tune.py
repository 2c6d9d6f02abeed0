"""Choosing token budgets from a trace: the ladder that serves it at the least cost.

A demand is the output tokens of one batch on one path. Each path is tuned alone, because the paths of a batch
replay independently; only the memory of all captures ties them together. Limits on frames and attention
segments are not modeled.

Which batches the manager makes depends on the ladder; with `packing: cost`, on every budget. So the search
takes the batches of greedy packing, which depend on the largest budget alone, and finds the best ladders for
these exactly. The manager's planner then compares the best few under the configured packing, and its
prediction is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH, CostModel
from fxsplit_encoder.planning.limits import Limits, default_budgets
from fxsplit_encoder.planning.plan import PathPlan, Plan
from fxsplit_encoder.planning.planner import build_plan
from fxsplit_encoder.tuning.search import (
    BatchCosts,
    Ladder,
    LadderLimits,
    cheapest_together,
    ladders_by_length,
)
from fxsplit_encoder.tuning.trace import Request, batch_loads, trace_demands, traced_paths


@dataclass(frozen=True)
class LadderForecast:
    """Predicted costs and padding of a ladder on the demands of one path."""

    budgets: Ladder
    cost: float
    """Of all demands together."""
    padding_fraction: float
    """The share of padding in the output tokens of all replays; 0.0 without replays."""
    hit_fraction: float
    """The share of the demands that are replayed."""


@dataclass(frozen=True)
class Forecast:
    """What the manager's planner predicts of a trace with a ladder for each path."""

    paths: Mapping[str, LadderForecast]
    host_cost: float
    """Of all batches, in addition; 0.0 where costs are not times."""

    @property
    def cost(self) -> float:
        """Cost of all demands on all paths, with the host's."""
        return sum(path.cost for path in self.paths.values()) + self.host_cost

    @property
    def num_graphs(self) -> int:
        """Captures of all paths."""
        return sum(len(path.budgets) for path in self.paths.values())


class Judge:
    """Plans the requests of a trace with ladders, by the manager's planner and at given costs.

    Segments and frames are not limited: how many a capture holds is known only once it is captured.
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

    def forecast(self, ladders: Mapping[str, Ladder]) -> Forecast:
        """The forecast for a ladder of each path, by its name."""
        in_ms = all(costs.unit == "ms" for costs in self.costs.values())
        per_batch = HOST_MS_PER_BATCH if in_ms else 0.0
        model = CostModel(
            {(path, ()): self.costs[path].of_ladder(ladder) for path, ladder in ladders.items()}, per_batch
        )
        limits = Limits(ladders, self.max_items, 0, frozenset(ladders))
        plans = [
            (build_plan(request, limits, packing=self.packing, costs=model), self._counts[sizes])
            for sizes, request in self._requests.items()
        ]
        num_batches = sum(len(plan.batches) * count for plan, count in plans)
        paths = {path: _of_path(path, ladder, plans) for path, ladder in ladders.items()}
        return Forecast(paths, num_batches * per_batch)


def _of_path(path: str, ladder: Ladder, plans: Sequence[tuple[Plan, int]]) -> LadderForecast:
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


# Less is within what predictions are worth.
_WORTH = 0.02


@dataclass(frozen=True)
class Tuning:
    """The tuned ladders, and those that they are compared with."""

    tuned: Forecast
    baseline: Forecast
    """Of the ladders in use, if known; else of the default ones, from the smallest to the largest demand that
    a budget may serve."""
    baseline_name: str
    """"current" or "default"."""
    unit: str
    """Of costs."""
    config: EncoderConfig
    """The settings to capture the tuned ladders with."""

    @property
    def gain(self) -> float:
        """The share of the baseline's cost that the tuned ladders save; negative where they cost more."""
        return 1 - self.tuned.cost / self.baseline.cost

    @property
    def advice(self) -> str:
        """Whether the tuned ladders are worth using, in a line."""
        tuned, before = self.tuned.num_graphs, self.baseline.num_graphs
        name = f"the {self.baseline_name} ladder ({before} graphs)"
        if self.gain >= _WORTH:
            return f"Use it: predicted to cost {self.gain:.1%} less than {name}."
        if self.gain <= -_WORTH:
            return f"Nothing to gain: {name} is predicted to cost less. Keep it, or allow more graphs."
        if tuned < before:
            return f"Nothing to gain but memory: {name} costs as much; the tuned one has {tuned}."
        return f"Nothing to gain: {name} costs as much. Keep it."


# --- the search

# Each takes a search of its own.
_MAX_CUTS = 64

# Each is planned request by request.
_MAX_JUDGED = 8


def tune_trace(
    requests: Sequence[Request],
    limits: LadderLimits,
    *,
    costs: Mapping[str, BatchCosts] | None = None,
    packing: Packing = "cost",
    current: Mapping[str, Ladder] | None = None,
) -> Tuning:
    """The ladders that serve the requests of a trace at the least cost.

    Every largest budget that a batch may fill is tuned by itself, for the batches that greedy packing makes
    with it; of more than 64, 64 spread evenly, the largest always. Of the eight cheapest ladders found, the
    one is taken of which the manager's planner predicts the least under `packing`. A batch holds as many
    items as the largest request; no budget is smaller, as `EncoderConfig` demands. InputError: there are no
    requests with tokens, or the limits allow no budget, or none pays.

    Args:
        costs: of a batch, by path; None: the estimate of `BatchCosts`.
        current: the budgets of every path to compare with; None: the default ladders.
    """
    paths = traced_paths(requests)
    if costs is None:
        costs = dict.fromkeys(paths, BatchCosts())
    elif unknown := [path for path in paths if path not in costs]:
        raise InputError(f"costs: expected those of path {unknown[0]!r} too; got {', '.join(costs)}")
    items = max(len(request) for request in requests)
    # Below this, a path would have nothing to serve, or its smallest budget less than a token an item.
    smallest = max(items, *(_smallest_item(requests, path) for path in paths))
    loads = np.array([max(load, smallest) for load in batch_loads(requests, items)])
    loads = _kept(np.unique(loads), [costs[path] for path in paths], limits, "any path")
    default: dict[str, Ladder] = {}  # for the largest cut, which comes first
    found: list[tuple[float, tuple[Ladder, ...]]] = []
    for cut in _cuts(loads, len(paths), limits):
        demands = trace_demands(requests, maximum=cut, max_items_per_batch=items)
        searched = {}
        for path, listed in demands.items():
            served = np.array([max(tokens, items) for tokens in listed if tokens <= cut])
            candidates = _kept(np.unique(served), [costs[path]], limits, f"path {path!r}")
            default.setdefault(path, tuple(default_budgets(int(candidates[0]), int(candidates[-1]))))
            searched[path] = ladders_by_length(listed, candidates, costs[path], limits.max_graphs)
        found.append(cheapest_together(searched, limits))
    judge = Judge(requests, packing, costs, items)
    ladders = dict.fromkeys(ladders for _, ladders in sorted(found, key=lambda each: each[0]))
    forecasts = [judge.forecast(dict(zip(paths, each, strict=True))) for each in [*ladders][:_MAX_JUDGED]]
    tuned = min(forecasts, key=lambda forecast: forecast.cost)
    if current is not None:
        current = {path: current[path] for path in paths if path in current}
    return Tuning(
        tuned,
        judge.forecast(current or default),
        "current" if current else "default",
        costs[paths[0]].unit,
        _config(tuned, limits, packing, items),
    )


def _smallest_item(requests: Sequence[Request], path: str) -> int:
    tokens = (item.spec.get_path_output_tokens(path) for request in requests for item in request)
    return min(count for count in tokens if count)


def _kept(
    budgets: NDArray[np.int64], costs: Sequence[BatchCosts], limits: LadderLimits, where: str
) -> NDArray[np.int64]:
    """The budgets that will be captured, by the costs of one path or another; raises InputError if none."""
    if not limits.only_kept:
        return budgets
    kept = budgets[np.any([each.keeps(budgets) for each in costs], axis=0)]
    if not len(kept):
        raise InputError(
            f"nothing to gain: of {len(budgets)} sizes that batches have on {where} none would be captured, "
            "since a replay costs as much as the exact shape; leave token_budgets out"
        )
    return kept


def _cuts(loads: NDArray[np.int64], num_paths: int, limits: LadderLimits) -> list[int]:
    """The tokens to cut requests at, decreasing: loads with room for a graph of each path, at most
    `_MAX_CUTS`.
    """
    fitting = [int(load) for load in loads if limits.allows(int(load), num_paths)]
    if not fitting:
        raise InputError(
            f"max_bytes: expected enough for {num_paths} graphs of at least {loads[0]} output tokens, "
            f"{limits.num_bytes(int(loads[0]), num_paths)} bytes by the memory model; got {limits.max_bytes}"
        )
    spread = np.unique(np.linspace(0, len(fitting) - 1, _MAX_CUTS).round().astype(int))
    return [fitting[position] for position in spread[::-1]]


def _config(tuned: Forecast, limits: LadderLimits, packing: Packing, items: int) -> EncoderConfig:
    settings: dict[str, Any] = {"max_items_per_batch": items}
    budgets = {name: path.budgets for name, path in tuned.paths.items()}
    if budgets.keys() == {"default"}:
        settings["token_budgets"] = budgets["default"]
    else:
        settings["paths"] = {name: {"token_budgets": ladder} for name, ladder in budgets.items()}
    if limits.max_bytes is not None:
        settings["max_graph_bytes"] = limits.max_bytes
    if packing != EncoderConfig().packing:
        settings["packing"] = packing
    return EncoderConfig(**settings)
