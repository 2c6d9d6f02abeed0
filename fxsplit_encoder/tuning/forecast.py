"""What a ladder of budgets would do on given demands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxsplit_encoder.config import Packing
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
