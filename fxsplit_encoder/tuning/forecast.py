"""What a ladder of budgets would do on given demands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxsplit_encoder.tuning.costs import BatchCosts


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
    """What a ladder does on the demands of a path.

    Args:
        budgets: output tokens of each budget, increasing, at least one.
        demands: output tokens of every batch, at least one, each above 0.
        costs: of a batch.
    """
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
