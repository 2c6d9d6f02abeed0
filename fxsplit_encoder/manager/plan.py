"""How a request is encoded, decided before anything runs and without looking at a tensor."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fxsplit_encoder.capture.reasons import MissReason
from fxsplit_encoder.manager.budgets import Limits
from fxsplit_encoder.manager.packing import pack_greedy
from fxsplit_encoder.manager.protocol import EncoderItemSpec

_SHOWN_ITEMS = 8


@dataclass(frozen=True)
class PathPlan:
    """How one path of a batch is encoded."""

    tokens: int
    """Output tokens of the batch on this path; 0: the path is skipped."""

    budget: int | None = None
    """The budget that is replayed; None: no replay."""

    reason: MissReason | None = None
    """Why the path falls back; None if it is replayed or skipped."""

    @property
    def result(self) -> str:
        """In a word: hit, skipped, or the reason of the miss."""
        return self.reason or ("hit" if self.tokens else "skipped")


@dataclass(frozen=True)
class PlannedBatch:
    """Items that are encoded together."""

    indices: tuple[int, ...]
    """The items' positions in the request, in the order in which they are packed."""

    paths: Mapping[str, PathPlan]
    """How each path is encoded."""

    output_tokens: int
    """Rows of the items' embeddings, all together."""

    @property
    def reason(self) -> MissReason | None:
        """Why the items count as misses, the first path's reason; None: every path is a hit or skipped."""
        return next((path.reason for path in self.paths.values() if path.reason), None)


@dataclass(frozen=True)
class Plan:
    """The batches of one request; printing it shows them as a table."""

    batches: tuple[PlannedBatch, ...]
    """In the order in which they run; every item is in exactly one of them."""

    num_items: int
    """Images and videos in the request."""

    @property
    def hits(self) -> int:
        """Items that replays alone serve."""
        return sum(len(batch.indices) for batch in self.batches if batch.reason is None)

    @property
    def misses(self) -> Mapping[MissReason, int]:
        """Items that fall back on some path, by reason; each item counts once."""
        counts: Counter[MissReason] = Counter()
        for batch in self.batches:
            if batch.reason:
                counts[batch.reason] += len(batch.indices)
        return dict(counts)

    @property
    def padding_fraction(self) -> float:
        """The share of padding in the tokens of all replays; 0.0 without replays."""
        replayed = [p for batch in self.batches for p in batch.paths.values() if p.budget is not None]
        budgets = sum(path.budget or 0 for path in replayed)
        return 1 - sum(path.tokens for path in replayed) / budgets if budgets else 0.0

    def __str__(self) -> str:
        missed = "".join(f", {count} {reason}" for reason, count in self.misses.items())
        summary = (
            f"{self.num_items} items in {len(self.batches)} batches: {self.hits} hit{missed}; "
            f"{self.padding_fraction:.1%} padding"
        )
        headers = ["batch", "items", "path", "tokens", "budget", "padding %", "result"]
        rows = [row for number, batch in enumerate(self.batches) for row in _rows(number, batch)]
        return f"{summary}\n{tabulate(rows, headers, floatfmt='.1f', missingval='-')}" if rows else summary


def build_plan(
    item_specs: Sequence[EncoderItemSpec],
    limits: Limits,
    captured: Collection[tuple[str, int]] | None = None,
    item_frames: Sequence[int] | None = None,
    *,
    exact: Collection[tuple[str, int]] = (),
    item_segments: Sequence[int] | None = None,
    segment_room: Mapping[tuple[str, int], int] | None = None,
) -> Plan:
    """Pack items greedily and give every path of a batch the smallest captured budget with room for it.

    Args:
        item_specs: the size of every item, from the tower.
        limits: what the captures have room for.
        captured: the (path, budget) pairs that can be replayed; None: all those of `limits`.
        item_frames: the video frames of every item, 0 for an image; None: frames are not limited.
        exact: the (path, budget) pairs of which it was measured that the exact shape is as fast.
        item_segments: the attention segments of every item; None: segments are not limited.
        segment_room: the segments that a (path, budget) holds; one that is left out holds any number.

    Raises:
        InputError: `item_frames` does not have one number for every item.
    """
    budgets = {
        path: [b for b in every if captured is None or (path, b) in captured or (path, b) in exact]
        for path, every in limits.path_budgets.items()
    }
    room = dict(segment_room or {}) if item_segments is not None else {}
    tokens = [{path: spec.get_path_output_tokens(path) for path in budgets} for spec in item_specs]
    packed = pack_greedy(
        tokens,
        [spec.output_tokens for spec in item_specs],
        # A path without captures falls back anyway: there only the configured budgets bound a batch.
        {path: (ready or limits.path_budgets[path])[-1] for path, ready in budgets.items()},
        limits.max_items_per_batch,
        item_frames,
        limits.max_frames_per_batch,
        item_segments if room else None,
        max(room.values(), default=0),
    )

    def plan_path(path: str, batch: list[int], frames_fit: bool) -> PathPlan:
        needed = sum(tokens[index][path] for index in batch)
        if needed == 0:
            return PathPlan(needed)
        if needed > limits.path_budgets[path][-1]:
            return PathPlan(needed, reason=MissReason.OVER_LARGEST_BUDGET)
        if not frames_fit:
            return PathPlan(needed, reason=MissReason.TOO_MANY_FRAMES)
        roomy = [budget for budget in budgets[path] if budget >= needed]
        segments = sum(item_segments[index] for index in batch) if item_segments is not None else 0
        fitting = [b for b in roomy if segments <= room.get((path, b), segments)]
        if not fitting:
            return PathPlan(needed, reason=MissReason.TOO_MANY_SEGMENTS if roomy else MissReason.NOT_CAPTURED)
        if (path, fitting[0]) in exact:
            return PathPlan(needed, reason=MissReason.EXACT_IS_FASTER)
        return PathPlan(needed, fitting[0])

    batches = []
    for batch in packed:
        frames_fit = item_frames is None or sum(item_frames[i] for i in batch) <= limits.max_frames_per_batch
        paths = {path: plan_path(path, batch, frames_fit) for path in budgets}
        batches.append(_batch(batch, paths, item_specs))
    return Plan(tuple(batches), len(item_specs))


def build_fallback_plan(
    item_specs: Sequence[EncoderItemSpec], paths: Iterable[str], reason: MissReason
) -> Plan:
    """One batch of all items, in order, that replays nothing and counts every item under `reason`.

    Args:
        item_specs: the size of every item, from the tower.
        paths: the names of the tower's paths.
        reason: why nothing is replayed.
    """
    tokens = {path: sum(spec.get_path_output_tokens(path) for spec in item_specs) for path in paths}
    planned = {path: PathPlan(count, reason=reason if count else None) for path, count in tokens.items()}
    everything = _batch(range(len(item_specs)), planned, item_specs)
    return Plan((everything,) if item_specs else (), len(item_specs))


def _batch(
    indices: Iterable[int], paths: Mapping[str, PathPlan], item_specs: Sequence[EncoderItemSpec]
) -> PlannedBatch:
    indices = tuple(indices)
    return PlannedBatch(indices, paths, sum(item_specs[index].output_tokens for index in indices))


def _rows(number: int, batch: PlannedBatch) -> list[list[object]]:
    shown = ", ".join(map(str, batch.indices[:_SHOWN_ITEMS]))
    hidden = len(batch.indices) - _SHOWN_ITEMS
    items = f"{shown} and {hidden} more" if hidden > 0 else shown
    return [
        [number, items, name, path.tokens, path.budget, _padding_percent(path), path.result]
        for name, path in batch.paths.items()
    ]


def _padding_percent(path: PathPlan) -> float | None:
    return 100 * (path.budget - path.tokens) / path.budget if path.budget else None
