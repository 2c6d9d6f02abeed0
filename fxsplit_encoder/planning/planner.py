"""Makes plans from item sizes: which items share a batch, and how each path of it is encoded."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from fxsplit_encoder.config import Packing
from fxsplit_encoder.planning.costs import CostModel, PathCosts, PathTable
from fxsplit_encoder.planning.limits import Limits
from fxsplit_encoder.planning.packing import pack_by_cost, pack_greedy
from fxsplit_encoder.planning.plan import Capacity, Item, Loads, MissReason, PathPlan, Plan, PlannedBatch

# Bounds the batches of a path that is never captured: its cost tables must end somewhere.
_LARGEST_WITHOUT_BUDGETS = 1 << 16

_SKIPPED = PathPlan(0)

_KIND = attrgetter("axis_keys", "refusal")


def build_plan(
    items: Sequence[Item],
    limits: Limits,
    packing: Packing = "cost",
    costs: CostModel | None = None,
) -> Plan:
    """Packs items into batches and decides how each path of a batch is encoded.

    With `cost` packing batches have the least predicted cost (see `pack_by_cost`), and each path takes the
    cheapest of its replays and fallbacks. The greedy packings take the smallest budget that fits.

    Args:
        items: the images and videos of a request; those with a refusal are batches apart, by reason.
        costs: with those of every capture; None: everything that `limits` lists is captured and not
            measured, so padding is minimized (`PathCosts.unmeasured`).
    """
    per_batch = costs.per_batch if costs is not None else None
    batches: list[PlannedBatch] = []
    for indices in _groups(items):
        chosen = items if len(indices) == len(items) else [items[index] for index in indices]
        paths = [_path(limits, name, chosen[0], costs) for name in limits.path_budgets]
        group = _Group(chosen, indices, paths)
        batches += [
            group.plan(positions, limits, packing == "cost", per_batch)
            for positions in group.pack(limits, packing, per_batch or 0.0)
        ]
    return Plan(tuple(batches), len(items))


def _groups(items: Sequence[Item]) -> Iterable[Sequence[int]]:
    """The positions of items that may share batches: of equal axis keys, and refused for one reason."""
    kinds = list(map(_KIND, items))
    if len(set(kinds)) <= 1:
        return [range(len(items))] if items else []
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        groups[kind].append(index)
    return groups.values()


# --- one path


@dataclass(slots=True)
class _Path:
    name: str
    listed: tuple[int, ...]
    """All budgets of the path, captured or not."""
    table: PathTable
    """With the budgets that are captured."""
    refusal: MissReason | None
    """Why no item of the group is replayed."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """Budgets of the greedy packings: captured ones, and those not needed."""
        captured, not_needed = self.table.holds, self.table.path_costs.not_needed
        return tuple(sorted((*captured, *not_needed))) if not_needed else captured

    def plan(
        self, tokens: int, segments: int, frames_fit: bool, items_fit: bool, by_cost: bool, pairs: float
    ) -> PathPlan:
        table = self.table
        if tokens == 0 and table.skippable:
            return _SKIPPED
        if self.refusal is not None:
            return PathPlan(tokens, reason=self.refusal)
        attention = table.path_costs.attention * pairs
        if not items_fit:
            milliseconds = table.path_costs.eager_curve.at(tokens) + attention if tokens else None
            return PathPlan(tokens, None, MissReason.EAGER_IS_FASTER, eager=True, milliseconds=milliseconds)
        fallback, eager = table.fallback(tokens)
        found = table.replay(tokens, segments, smallest=not by_cost) if frames_fit else None
        if found is not None:
            budget, cost = found
            by_prices = by_cost and table.path_costs.measured
            if cost <= fallback if by_prices else not self._exact_serves(tokens, budget):
                milliseconds = cost + attention if table.path_costs.measured else None
                return PathPlan(tokens, budget, milliseconds=milliseconds)
        milliseconds = fallback + attention if tokens and table.predicts_fallbacks else None
        return PathPlan(
            tokens, None, self._reason(tokens, frames_fit, found is not None, eager), eager, milliseconds
        )

    def _exact_serves(self, tokens: int, below: float) -> bool:
        return any([tokens <= budget < below for budget in self.table.path_costs.not_needed])

    def _reason(self, tokens: int, frames_fit: bool, fits: bool, eager: bool) -> MissReason:
        if not fits:
            if self.listed and tokens > self.listed[-1]:
                return MissReason.OVER_LARGEST_BUDGET
            if not frames_fit:
                return MissReason.TOO_MANY_FRAMES
            if not self._exact_serves(tokens, float("inf")):
                if not self.table.budgets or tokens > self.table.budgets[-1]:
                    return MissReason.NOT_CAPTURED
                held = tokens <= self.table.holds[-1]
                return MissReason.TOO_MANY_SEGMENTS if held else MissReason.EXTENT_EXCEEDED
        return MissReason.EAGER_IS_FASTER if eager else MissReason.EXACT_IS_FASTER


def _path(limits: Limits, name: str, item: Item, costs: CostModel | None) -> _Path:
    """A path of the batches of such items."""
    listed = limits.path_budgets[name]
    priced = costs.paths.get((name, item.axis_keys), _NO_COSTS) if costs is not None else _unmeasured(listed)
    ready = tuple([budget for budget in listed if budget in priced.replay])
    largest = listed[-1] if listed else _LARGEST_WITHOUT_BUDGETS
    table = priced.table(ready, largest, name in limits.skippable_paths)
    return _Path(name, listed, table, item.refusal)


# The costs of a path without measurements, where others have some.
_NO_COSTS = PathCosts()


@functools.lru_cache(maxsize=1024)
def _unmeasured(budgets: tuple[int, ...]) -> PathCosts:
    return PathCosts.unmeasured(budgets)


# --- the items of a request


class _Group:
    def __init__(self, items: Sequence[Item], indices: Sequence[int], paths: Sequence[_Path]) -> None:
        self._indices = indices
        self._axis_keys = items[0].axis_keys
        self._is_refused = items[0].refusal is not None
        self._paths = paths
        self._loads = Loads(items, [path.name for path in paths])
        self._has_frames = any(self._loads.frames)
        self._pairs: list[float] | None = None
        if any([path.table.path_costs.attention for path in paths]):
            # An item's segments are taken as equally long.
            self._pairs = [item.spec.input_size**2 / max(item.segments, 1) for item in items]

    def pack(self, limits: Limits, packing: Packing, per_batch: float) -> list[list[int]]:
        if len(self._loads) == 1:
            return [[0]]
        if self._is_refused:
            order, most = list(range(len(self._loads))), limits.max_items_per_batch
            return [order[start : start + most] for start in range(0, len(order), most)]
        held = [most for path in self._paths for most in path.table.max_segments if most is not None]
        capacity = Capacity(
            # A path without captures falls back anyway: there only the configured budgets bound a batch.
            {path.name: path.budgets[-1] if path.budgets else path.table.largest for path in self._paths},
            limits.max_items_per_batch,
            limits.max_frames_per_batch,
            max(held, default=None),
        )
        if packing == "cost":
            tables = {path.name: path.table for path in self._paths}
            return pack_by_cost(self._loads, tables, capacity, per_batch)
        deferring = packing == "greedy_defer"
        budgets = {path.name: path.budgets for path in self._paths} if deferring else None
        return pack_greedy(self._loads, capacity, budgets)

    def plan(
        self, positions: Sequence[int], limits: Limits, by_cost: bool, per_batch: float | None
    ) -> PlannedBatch:
        """Plans a batch; `per_batch` is its host time, None: not known."""
        loads = self._loads
        frames_fit = not self._has_frames or _sum(loads.frames, positions) <= limits.max_frames_per_batch
        items_fit = len(positions) <= limits.max_items_per_batch
        segments = _sum(loads.segments, positions)
        pairs = _sum(self._pairs, positions) if self._pairs is not None else 0.0
        plans = {}
        milliseconds = per_batch
        for path in self._paths:
            tokens = _sum(loads.tokens[path.name], positions)
            planned = path.plan(tokens, segments, frames_fit, items_fit, by_cost, pairs)
            plans[path.name] = planned
            if milliseconds is not None and planned is not _SKIPPED:
                known = planned.milliseconds
                milliseconds = milliseconds + known if known is not None else None
        indices = tuple([self._indices[position] for position in positions])
        return PlannedBatch(indices, plans, _sum(loads.totals, positions), self._axis_keys, milliseconds)


_T = TypeVar("_T", int, float)


def _sum(values: Sequence[_T], positions: Sequence[int]) -> _T:
    # Items above the largest budget are batches of their own, which a request may have many of.
    return values[positions[0]] if len(positions) == 1 else sum(map(values.__getitem__, positions))
