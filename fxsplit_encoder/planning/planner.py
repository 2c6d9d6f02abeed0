"""From item sizes to a plan: which items share a batch, and how each path of it is encoded."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.cost_packing import PathLoad, pack_by_cost
from fxsplit_encoder.planning.costs import PathTable, RouteCosts
from fxsplit_encoder.planning.limits import CaptureKey, Limits
from fxsplit_encoder.planning.packing import pack_greedy
from fxsplit_encoder.planning.plan import PathPlan, Plan, PlannedBatch
from fxsplit_encoder.planning.reasons import MissReason

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from fxsplit_encoder.config import Packing
    from fxsplit_encoder.planning.costs import CostModel
    from fxsplit_encoder.protocol import EncoderItemSpec

# Bounds the batches of a path that is never captured: its cost tables must end somewhere.
_LARGEST_WITHOUT_BUDGETS = 1 << 16

_SKIPPED = PathPlan(0)


def build_plan(
    item_specs: Sequence[EncoderItemSpec],
    limits: Limits,
    captured: Collection[CaptureKey] | None = None,
    item_frames: Sequence[int] | None = None,
    *,
    exact: Collection[CaptureKey] = (),
    item_segments: Sequence[int] | None = None,
    segment_room: Mapping[CaptureKey, int] | None = None,
    item_axis_keys: Sequence[tuple[Hashable, ...]] | None = None,
    item_reasons: Sequence[MissReason | None] | None = None,
    packing: Packing = "cost",
    costs: CostModel | None = None,
) -> Plan:
    """Pack items into batches and decide how each path of a batch is encoded.

    With `cost` packing the predicted costs of all batches add up to the least (see `pack_by_cost`), and each
    path takes the cheapest of its replays and fallbacks. The greedy packings take the smallest budget with
    room.

    Args:
        item_specs: the size of every item, from the tower.
        limits: what the captures have room for.
        captured: what can be replayed; None: everything that `limits` lists.
        item_frames: the video frames of every item, 0 for an image; None: frames are not limited.
        exact: the budgets that were not captured because the exact shape was measured to be as fast.
        item_segments: the attention segments of every item; None: segments are not limited.
        segment_room: the segments that a capture holds, one that is left out any number; None: what `costs`
            says.
        item_axis_keys: the keys of every item on the capture axes; only equal ones share a batch. None: the
            tower has no capture axes.
        item_reasons: why an item is never replayed, None for one that may be. Those with a reason are batches
            of their own, in the order of the request and apart by reason. None: all may be replayed.
        packing: one of the configuration's packings.
        costs: what batches cost; None: not measured, so padding is minimised (`RouteCosts.unmeasured`).

    Raises:
        InputError: a sequence does not have one entry for every item, or `costs` has no price for a capture.
    """
    per_item = (item_frames, item_segments, item_axis_keys, item_reasons)
    if wrong := [
        len(entries) for entries in per_item if entries is not None and len(entries) != len(item_specs)
    ]:
        raise InputError(
            f"frames, segments, axis keys and reasons must have one entry an item; got {wrong} entries for "
            f"{len(item_specs)} items"
        )
    make_route = functools.partial(
        _route, limits, captured=captured, exact=exact, segment_room=segment_room, costs=costs
    )
    per_batch = costs.per_batch if costs is not None else None
    batches: list[PlannedBatch] = []
    for axis_keys, reason, indices in _groups(len(item_specs), item_axis_keys, item_reasons):
        if reason is not None:
            batches += _fall_back(item_specs, limits, indices, axis_keys, reason)
            continue
        routes = [make_route(path, axis_keys) for path in limits.path_budgets]
        group = _Group(indices, axis_keys, item_specs, item_frames, item_segments, routes)
        batches += [
            group.plan(positions, limits.max_frames_per_batch, packing == "cost", per_batch)
            for positions in group.pack(limits, packing, per_batch or 0.0)
        ]
    return Plan(tuple(batches), len(item_specs))


def build_fallback_plan(
    item_specs: Sequence[EncoderItemSpec],
    paths: Iterable[str],
    reason: MissReason,
    skippable_paths: Collection[str] | None = None,
) -> Plan:
    """One batch of all items, in order, that replays nothing and counts every item under `reason`.

    Args:
        item_specs: the size of every item, from the tower.
        paths: the names of the tower's paths.
        reason: why nothing is replayed.
        skippable_paths: the paths that are skipped where the items have no tokens; None: any.
    """
    if not item_specs:
        return Plan((), 0)
    names = tuple(paths)
    skippable = frozenset(names if skippable_paths is None else skippable_paths)
    limits = Limits(dict.fromkeys(names, ()), len(item_specs), 0, skippable)
    batches = _fall_back(item_specs, limits, range(len(item_specs)), (), reason)
    return Plan(tuple(batches), len(item_specs))


def _groups(
    num_items: int,
    item_axis_keys: Sequence[tuple[Hashable, ...]] | None,
    item_reasons: Sequence[MissReason | None] | None,
) -> Iterable[tuple[tuple[Hashable, ...], MissReason | None, Sequence[int]]]:
    """The items that may share batches: their axis keys, why they are not replayed, their positions."""
    if num_items == 0:
        return []
    if item_axis_keys is None and item_reasons is None:
        return [((), None, range(num_items))]
    groups: defaultdict[tuple[tuple[Hashable, ...], MissReason | None], list[int]] = defaultdict(list)
    for index in range(num_items):
        axis_keys = item_axis_keys[index] if item_axis_keys is not None else ()
        groups[axis_keys, item_reasons[index] if item_reasons is not None else None].append(index)
    return [(axis_keys, reason, indices) for (axis_keys, reason), indices in groups.items()]


# --- one path


@dataclass(slots=True)
class _Route:
    """One path at one combination of axis keys."""

    name: str

    listed: tuple[int, ...]
    """All budgets of the path, captured or not."""

    exact: tuple[int, ...]
    """Those at which the exact shape was measured to be as fast."""

    table: PathTable
    """The costs, with the budgets that are captured."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """What the greedy packings pack for: budgets that were captured, or not for being no faster."""
        return tuple(sorted((*self.table.budgets, *self.exact))) if self.exact else self.table.budgets

    @property
    def greedy_maximum(self) -> int:
        """The tokens that a batch of the greedy packings may have."""
        # A path without captures falls back anyway: there only the configured budgets bound a batch.
        return self.budgets[-1] if self.budgets else self.table.largest

    def plan(
        self, tokens: int, segments: int | None, frames_fit: bool, by_cost: bool, pairs: float
    ) -> PathPlan:
        """How a batch is encoded: its tokens, segments, and attended pairs."""
        table = self.table
        if tokens == 0 and table.skippable:
            return _SKIPPED
        attention = table.route.attention * pairs
        fallback, eager = table.fallback(tokens)
        found = table.replay(tokens, segments, smallest=not by_cost) if frames_fit else None
        if found is not None:
            budget, cost = found
            by_prices = by_cost and table.route.measured
            if cost <= fallback if by_prices else not self._exact_serves(tokens, budget):
                milliseconds = cost + attention if table.route.measured else None
                return PathPlan(tokens, budget, milliseconds=milliseconds)
        milliseconds = fallback + attention if tokens and table.predicts_fallbacks else None
        return PathPlan(
            tokens, None, self._reason(tokens, frames_fit, found is not None, eager), eager, milliseconds
        )

    def _exact_serves(self, tokens: int, below: float) -> bool:
        return bool(self.exact) and any(tokens <= budget < below for budget in self.exact)

    def _reason(self, tokens: int, frames_fit: bool, fits: bool, eager: bool) -> MissReason:
        if not fits:
            if self.listed and tokens > self.listed[-1]:
                return MissReason.OVER_LARGEST_BUDGET
            if not frames_fit:
                return MissReason.TOO_MANY_FRAMES
            if not self._exact_serves(tokens, float("inf")):
                captured = bool(self.table.budgets) and tokens <= self.table.budgets[-1]
                return MissReason.TOO_MANY_SEGMENTS if captured else MissReason.NOT_CAPTURED
        return MissReason.EAGER_IS_FASTER if eager else MissReason.EXACT_IS_FASTER


def _route(
    limits: Limits,
    path: str,
    axis_keys: tuple[Hashable, ...],
    *,
    captured: Collection[CaptureKey] | None,
    exact: Collection[CaptureKey],
    segment_room: Mapping[CaptureKey, int] | None,
    costs: CostModel | None,
) -> _Route:
    listed = limits.path_budgets[path]
    keys = [CaptureKey(path, budget, axis_keys) for budget in listed]
    ready = [key for key in keys if (captured is None or key in captured) and key not in exact]
    budgets = tuple([key.budget for key in ready])
    priced = costs.routes.get((path, axis_keys), _NO_COSTS) if costs is not None else _unmeasured(budgets)
    if segment_room is not None:
        room = tuple([segment_room.get(key) for key in ready])
    else:
        room = tuple([priced.room.get(budget) for budget in budgets])
    for budget in budgets:
        if budget not in priced.replay:
            raise InputError(
                f"costs: path {path!r}, axis keys {axis_keys}: budget {budget} can be replayed; expected its "
                f"milliseconds, got those of {sorted(priced.replay)}"
            )
    largest = listed[-1] if listed else _LARGEST_WITHOUT_BUDGETS
    table = priced.table(budgets, room, largest, path in limits.skippable_paths)
    return _Route(path, listed, tuple([key.budget for key in keys if key in exact]), table)


# What a route without measurements costs beside others that have some.
_NO_COSTS = RouteCosts()


@functools.lru_cache(maxsize=1024)
def _unmeasured(budgets: tuple[int, ...]) -> RouteCosts:
    return RouteCosts.unmeasured(budgets)


# --- the items of a request


def _fall_back(
    specs: Sequence[EncoderItemSpec],
    limits: Limits,
    indices: Sequence[int],
    axis_keys: tuple[Hashable, ...],
    reason: MissReason,
) -> list[PlannedBatch]:
    """Batches of as many of the items `indices` as allowed, in order, that replay nothing."""
    batches = []
    for start in range(0, len(indices), limits.max_items_per_batch):
        batch = tuple(indices[start : start + limits.max_items_per_batch])
        paths = {}
        for path in limits.path_budgets:
            tokens = sum(specs[index].get_path_output_tokens(path) for index in batch)
            skipped = tokens == 0 and path in limits.skippable_paths
            paths[path] = _SKIPPED if skipped else PathPlan(tokens, reason=reason)
        batches.append(
            PlannedBatch(batch, paths, sum(specs[index].output_tokens for index in batch), axis_keys)
        )
    return batches


class _Group:
    """Items that may share batches: those of a request at the positions `indices`, with equal axis keys."""

    def __init__(
        self,
        indices: Sequence[int],
        axis_keys: tuple[Hashable, ...],
        specs: Sequence[EncoderItemSpec],
        frames: Sequence[int] | None,
        segments: Sequence[int] | None,
        routes: Sequence[_Route],
    ) -> None:
        if len(indices) < len(specs):
            specs, frames, segments = (_choose(entries, indices) for entries in (specs, frames, segments))
        self._indices = indices
        self._axis_keys = axis_keys
        self._totals = [spec.output_tokens for spec in specs]
        self._tokens = [
            (route, [spec.get_path_output_tokens(route.name) for spec in specs]) for route in routes
        ]
        self._frames = frames
        self._segments = segments
        self._pairs: list[float] | None = None
        if any([route.table.route.attention for route in routes]):
            # An item's segments are taken as equally long.
            counts = [1] * len(specs) if segments is None else segments
            self._pairs = [spec.input_size**2 / count for spec, count in zip(specs, counts, strict=True)]

    def pack(self, limits: Limits, packing: Packing, per_batch: float) -> list[list[int]]:
        """The positions in this group of the items of every batch."""
        if len(self._totals) == 1:
            return [[0]]
        rooms = [room for route, _ in self._tokens for room in route.table.room if room is not None]
        max_segments = max(rooms, default=0)
        if packing == "cost":
            loads = [PathLoad(counts, route.greedy_maximum, route.table) for route, counts in self._tokens]
            return pack_by_cost(
                loads,
                self._totals,
                limits.max_items_per_batch,
                self._frames,
                limits.max_frames_per_batch,
                self._segments,
                max_segments,
                per_batch,
            )
        positions = range(len(self._totals))
        return pack_greedy(
            [{route.name: counts[position] for route, counts in self._tokens} for position in positions],
            self._totals,
            {route.name: route.greedy_maximum for route, _ in self._tokens},
            limits.max_items_per_batch,
            self._frames,
            limits.max_frames_per_batch,
            self._segments if rooms else None,
            max_segments,
            {route.name: route.budgets for route, _ in self._tokens} if packing == "greedy_defer" else None,
        )

    def plan(
        self, positions: Sequence[int], max_frames: int, by_cost: bool, per_batch: float | None
    ) -> PlannedBatch:
        """How a batch is encoded; `per_batch` is its host time, None if it is not known."""
        frames_fit = self._frames is None or _sum(self._frames, positions) <= max_frames
        segments = _sum(self._segments, positions) if self._segments is not None else None
        pairs = _sum(self._pairs, positions) if self._pairs is not None else 0.0
        paths = {}
        milliseconds = per_batch
        for route, counts in self._tokens:
            tokens = _sum(counts, positions)
            planned = route.plan(tokens, segments, frames_fit, by_cost, pairs)
            paths[route.name] = planned
            if milliseconds is not None and planned is not _SKIPPED:
                known = planned.milliseconds
                milliseconds = milliseconds + known if known is not None else None
        indices = tuple([self._indices[position] for position in positions])
        return PlannedBatch(indices, paths, _sum(self._totals, positions), self._axis_keys, milliseconds)


_T = TypeVar("_T", int, float)


def _sum(values: Sequence[_T], positions: Sequence[int]) -> _T:
    # Items above the largest budget are batches of their own, which a request may have many of.
    return values[positions[0]] if len(positions) == 1 else sum(map(values.__getitem__, positions))


def _choose(entries: Any, indices: Sequence[int]) -> Any:
    return None if entries is None else [entries[index] for index in indices]
