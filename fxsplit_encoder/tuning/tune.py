"""Choosing token budgets from a trace: the ladder that serves it at the least cost.

A demand is the output tokens of one batch on one path. Each path is tuned alone, because the paths of a batch
replay independently: each takes the smallest of its own budgets that holds its own tokens. Only the memory
of all captures ties them together. Limits on frames and attention segments are not modeled.

Which batches the manager makes depends on the ladder; with `packing: cost`, on every budget. So the search
takes the batches of greedy packing, which depend on the largest budget alone, and finds the best ladders for
these exactly. The manager's planner then judges the best few under the configured packing, and what it
predicts is what is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fxsplit_encoder.config import Packing
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.limits import default_budgets
from fxsplit_encoder.tuning.costs import BatchCosts
from fxsplit_encoder.tuning.forecast import Judge, LadderForecast, PathTuning, Tuning, forecast
from fxsplit_encoder.tuning.search import (
    LadderLimits,
    LadderSearch,
    candidate_budgets,
    cheapest_ladders,
    check_positive,
    round_up,
)
from fxsplit_encoder.tuning.trace import Request, batch_loads, trace_demands, traced_paths

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
        requests: the trace.
        limits: what the ladders may be.
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
    sizes = {path: [_path_tokens(request, path) for request in requests] for path in paths}
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
    demands, rounded up, are worth considering as budgets. See `LadderSearch` for how the best are found.

    Args:
        demands: the output tokens of every batch, by path; at least one each, and above 0.
        limits: what the ladders may be.
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
    """The budgets that will be captured, by the costs of one path or another.

    Raises:
        InputError: none.
    """
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
    """The tokens to cut requests at, decreasing: loads at which a graph of each path fits, at most
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
    """What a ladder could cost at the least: if every demand had a budget of its own."""
    tokens = np.asarray(demands)
    return float(np.minimum(costs.replay(np.maximum(tokens, minimum)), costs.exact(tokens)).sum())


def _path_tokens(request: Request, path: str) -> list[int]:
    return [item.spec.get_path_output_tokens(path) for item in request]


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
