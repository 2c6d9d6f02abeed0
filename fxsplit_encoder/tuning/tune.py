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
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from fxsplit_encoder.config import EncoderConfig, Packing
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH, CostModel
from fxsplit_encoder.planning.limits import Limits, default_budgets
from fxsplit_encoder.planning.plan import PathPlan, Plan
from fxsplit_encoder.planning.planner import build_plan
from fxsplit_encoder.tuning.costs import BatchCosts
from fxsplit_encoder.tuning.search import (
    LadderLimits,
    LadderSearch,
    candidate_budgets,
    cheapest_ladders,
    check_positive,
    round_up,
)
from fxsplit_encoder.tuning.trace import Request, batch_loads, trace_demands, traced_paths


@dataclass(frozen=True)
class LadderForecast:
    """Predicted costs and padding of a ladder on the demands of one path."""

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
    """Predicts costs and padding of a ladder on the demands of a path."""
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

    def forecast(self, ladders: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, LadderForecast], float]:
        """Each path's forecast for its ladder, by its name, and the host's cost of all batches."""
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
    """Of the ladder in use, if known; else of the default one, from the smallest to the largest demand that a
    budget may serve."""

    def as_dict(self) -> dict[str, Any]:
        """Both forecasts as plain values that JSON can hold."""
        return {"tuned": asdict(self.tuned), "baseline": asdict(self.baseline)}


@dataclass(frozen=True)
class Tuning:
    """The tuned ladder of every path; printing it shows them as a table."""

    paths: Mapping[str, PathTuning]
    unit: str
    """Of costs."""
    max_items_per_batch: int = 0
    """The items of a batch that the demands were cut for; 0: not known."""
    max_bytes: int | None = None
    """The memory limit of the ladders; None: none."""
    packing: Packing = "cost"
    host_cost: float = 0.0
    """Of the batches of the tuned ladders, in addition; 0.0 where costs are not times."""
    baseline_name: str = "default"
    """Which ladders the tuned ones are compared with: "default", or "current" ones."""
    baseline_host_cost: float = 0.0

    @property
    def cost(self) -> float:
        """Cost of all demands on all paths, by the tuned ladders, with the host's."""
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


# --- the search

# Each takes a search of its own.
_MAX_CUTS = 64

# Each is planned request by request.
_MAX_JUDGED = 8


def tune_trace(
    requests: Sequence[Request],
    limits: LadderLimits,
    *,
    costs: BatchCosts | Mapping[str, BatchCosts] | None = None,
    packing: Packing = "cost",
    max_items_per_batch: int | None = None,
    current: Mapping[str, tuple[int, ...]] | None = None,
) -> Tuning:
    """The ladders that serve the requests of a trace at the least cost.

    Every largest budget that a batch may fill is tuned by itself, for the batches that greedy packing makes
    with it; of more than 64, 64 spread evenly, the largest always. Of the eight cheapest ladders found, the
    one is taken of which the manager's planner predicts the least under `packing`.

    Args:
        costs: of a batch, for every path alike or by path; None: the estimate of `BatchCosts`.
        packing: how the manager will pack; forecasts are those of its planner.
        max_items_per_batch: items of a batch, at most; no budget is smaller, as `EncoderConfig` demands.
            None: those of the request with the most items.
        current: the budgets of every path to compare with; None: the default ladders.

    Raises:
        InputError: there are no requests with tokens, or the limits allow no budget, or none pays.
    """
    paths = traced_paths(requests)
    items = max_items_per_batch or max(len(request) for request in requests)
    sizes = {
        path: [[item.spec.get_path_output_tokens(path) for item in request] for request in requests]
        for path in paths
    }
    most = max(sum(size) for listed in sizes.values() for size in listed)
    largest = limits.maximum or round_up(most, limits.granularity)
    # Below this, a path would have nothing to serve, or its smallest budget less than a token an item.
    smallest = max(items, *(min(n for size in listed for n in size if n) for listed in sizes.values()))
    if largest < smallest:
        raise InputError(
            f"maximum: expected at least {smallest} output tokens, one for each of {items} items and the "
            f"smallest item of every path; got {largest}"
        )
    path_costs = _costs_by_path(costs, paths)
    tunings: list[Tuning] = []
    loads = candidate_budgets([*batch_loads(requests, items), largest], smallest, largest, limits.granularity)
    loads = _kept(loads, list(path_costs.values()), limits, "any path")
    for cut in _cuts(loads, len(paths), limits):
        demands = trace_demands(requests, maximum=cut, max_items_per_batch=items)
        floor = sum(_floor(demands[path], items, path_costs[path]) for path in paths)
        if tunings and floor >= min(tuning.cost for tuning in tunings):
            continue  # not even with a budget for every demand
        tunings.append(
            tune_budgets(
                demands, replace(limits, maximum=cut), costs=path_costs, minimum=items, serve_largest=True
            )
        )
    judge = Judge(requests, packing, path_costs, items)
    found = list(dict.fromkeys(tuning.ladders for tuning in sorted(tunings, key=lambda t: t.cost)))
    judged = [judge.forecast(dict(ladders)) for ladders in found[:_MAX_JUDGED]]
    tuned, host_cost = min(judged, key=lambda each: _total(*each))
    # Another ladder is judged by the batches that it would make itself: the default one up to the largest.
    others = current or {path: tunings[0].paths[path].baseline.budgets for path in paths}
    baseline, baseline_host_cost = judge.forecast(others)
    return Tuning(
        {path: PathTuning(tuned[path], baseline[path]) for path in paths},
        next(iter(path_costs.values())).unit,
        items,
        limits.max_bytes,
        packing,
        host_cost,
        "current" if current else "default",
        baseline_host_cost,
    )


def _total(forecasts: Mapping[str, LadderForecast], host_cost: float) -> float:
    return sum(forecast.cost for forecast in forecasts.values()) + host_cost


def tune_budgets(
    demands: Mapping[str, Sequence[int]],
    limits: LadderLimits,
    *,
    costs: BatchCosts | Mapping[str, BatchCosts] | None = None,
    minimum: int = 1,
    serve_largest: bool = False,
) -> Tuning:
    """The ladders that serve given demands at the least cost, exactly.

    The smallest budget that holds a demand serves it, or its exact shape where that costs less. Only the
    demands, rounded up, are candidates for budgets. See `LadderSearch` for the search.

    Args:
        demands: the output tokens of every batch, by path; at least one each, and above 0.
        costs: of a batch, for every path alike or by path; None: the estimate of `BatchCosts`.
        minimum: output tokens of the smallest budget, at least.
        serve_largest: whether each ladder must hold the largest demand up to `limits.maximum`.

    Raises:
        InputError: a path has no demand that a budget may serve, `minimum` is not positive, or the limits
            allow no budget.
    """
    check_positive(minimum=minimum)
    for path, listed in demands.items():
        if not listed or min(listed) < 1:
            raise InputError(f"demands of path {path!r}: expected one or more, all above 0; got {listed}")
    if not demands:
        raise InputError("demands: expected those of one path or more; got none")
    path_costs = _costs_by_path(costs, demands)
    searches = {}
    for path, listed in demands.items():
        largest = limits.maximum if limits.maximum is not None else max(listed)
        if min(listed) > largest or minimum > largest:
            raise InputError(
                f"maximum: expected at least {max(min(listed), minimum)} output tokens on path {path!r}, its "
                f"smallest demand or `minimum`; got {largest}"
            )
        candidates = candidate_budgets(listed, minimum, largest, limits.granularity)
        candidates = _kept(candidates, [path_costs[path]], limits, f"path {path!r}")
        searches[path] = LadderSearch(
            listed, candidates, path_costs[path], limits.max_graphs, serve_largest=serve_largest
        )
    ladders = cheapest_ladders(searches, limits)
    return Tuning(
        {
            path: PathTuning(
                forecast(ladders[path], demands[path], path_costs[path]),
                forecast(
                    default_budgets(int(search.candidates[0]), int(search.candidates[-1])),
                    demands[path],
                    path_costs[path],
                ),
            )
            for path, search in searches.items()
        },
        next(iter(path_costs.values())).unit,
        max_bytes=limits.max_bytes,
    )


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
    max_bytes, memory = limits.max_bytes, limits.memory
    fitting = loads if max_bytes is None else loads[loads <= memory.largest_budget(max_bytes, num_paths)]
    if not len(fitting):
        raise InputError(
            f"max_bytes: expected enough for {num_paths} graphs of at least {loads[0]} output tokens, "
            f"{memory.num_bytes(int(loads[0]), num_paths)} bytes by the memory model; got {max_bytes}"
        )
    spread = np.unique(np.linspace(0, len(fitting) - 1, _MAX_CUTS).round().astype(int))
    return fitting[spread][::-1].tolist()  # type: ignore[no-any-return]


def _floor(demands: Sequence[int], minimum: int, costs: BatchCosts) -> float:
    """The least cost of a ladder: with a budget for every demand."""
    tokens = np.asarray(demands)
    return float(np.minimum(costs.replay(np.maximum(tokens, minimum)), costs.exact(tokens)).sum())


def _costs_by_path(
    costs: BatchCosts | Mapping[str, BatchCosts] | None, paths: Iterable[str]
) -> dict[str, BatchCosts]:
    if not isinstance(costs, Mapping):
        return dict.fromkeys(paths, costs or BatchCosts())
    for path in paths:
        if path not in costs:
            raise InputError(f"costs: expected those of path {path!r} too; got {', '.join(costs)}")
    by_path = {path: costs[path] for path in paths}
    if len({cost.unit for cost in by_path.values()}) > 1:
        raise InputError(f"costs: expected one unit for all paths; got {by_path}")
    return by_path
