"""Statistics and weights of what `torch.compile(..., backend="encoder_cg")` returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fxsplit_encoder._torch.dynamo import original_module, owners_of
from fxsplit_encoder.backend.dispatch import BudgetDispatcher, dispatchers
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.runtime.statistics import ManagerStats


def stats_of_compiled(compiled: Callable[..., Any]) -> ManagerStats:
    """The counts of all graphs of a compiled module or function, as those of a manager; each call is an item.

    A wrapped tower's calls that its own forward served are misses among them, by why. Calls that
    Dynamo ran without this backend are not counted: it does not see them.
    """
    parts = [dispatcher.stats() for dispatcher in _dispatchers_of(compiled)]
    return with_eager_calls(ManagerStats.total(parts), original_module(compiled))


def refresh_compiled(compiled: Callable[..., Any]) -> None:
    """As `fxsplit_encoder.refresh`, of a compiled module or function."""
    for dispatcher in _dispatchers_of(compiled):
        dispatcher.outdate_weights()
    getattr(original_module(compiled), "outdate_tables", lambda: None)()


def _dispatchers_of(compiled: Callable[..., Any]) -> list[BudgetDispatcher]:
    owners = {id(owner) for owner in owners_of(compiled)}
    return [
        dispatcher
        for dispatcher in dispatchers()
        if any(id(reference()) in owners for reference in dispatcher.owners)
    ]


def with_eager_calls(stats: ManagerStats, module: Any) -> ManagerStats:
    """Statistics with the calls that a wrapped tower's own forward served."""
    calls: Counter[MissReason] = Counter(getattr(module, "eager_calls", ()))
    if not calls:
        return stats
    misses = dict(calls + Counter(stats.misses))
    runs = {**stats.fallback_runs, "eager": stats.fallback_runs.get("eager", 0) + calls.total()}
    return replace(stats, misses=misses, fallback_runs=runs)
