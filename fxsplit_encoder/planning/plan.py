"""The items of a request, and the plan of how they are encoded, made without looking at a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from tabulate import tabulate

from fxsplit_encoder.protocol import EncoderItemSpec


class MissReason(StrEnum):
    """Reason why an item was not served by a replay; every fallback is counted under one."""

    OVER_LARGEST_BUDGET = "over_largest_budget"
    TOO_MANY_FRAMES = "too_many_frames"
    TOO_MANY_SEGMENTS = "too_many_segments"
    """More images and frames than any budget that holds the tokens has segments."""
    NOT_CAPTURED = "not_captured"
    """The budgets that would fit are not captured, or were dropped at capture."""
    DISABLED = "disabled"
    """Captures are switched off, by `enabled: false` or `mode: none`."""
    EXACT_IS_FASTER = "exact_is_faster"
    """By the measurements, the compiled forward at the exact shape costs no more than the replay."""
    EAGER_IS_FASTER = "eager_is_faster"
    """By the measurements, the eager forward costs less than the replay and than the exact shape."""
    UNSUPPORTED_INPUT = "unsupported_input"
    """The tower captures nothing for this modality or kind of input."""
    EXTENT_EXCEEDED = "extent_exceeded"
    """A value that the replay needs is larger than the captured buffer, or has no buffer."""
    PADDING_UNPROVED = "padding_unproved"
    """The graph's rows may depend on one another, so it is never padded."""
    UNSUPPORTED_GRAPH = "unsupported_graph"
    """Nothing is captured: the graph draws random numbers or has sizes that depend on data, or an accelerated
    tower is not supported. A warning says why."""
    NEW_SHAPE = "new_shape"
    """With `mode: exact`: batches of this token count have not come often enough to be captured. Behind
    torch.compile also: calls of these sizes, of a graph without a token count."""
    OPTIONS = "options"
    """The call's arguments change what the tower returns, such as `output_hidden_states=True`."""
    GRADIENTS = "gradients"
    TRAINING = "training"
    """A module of the tower is in training mode, and computes something else there."""
    AUTOCAST = "autocast"
    """The call runs under autocast, whose dtypes captures do not have."""
    FOREIGN_CODE = "foreign_code"
    """The tower runs code that captures would leave out: hooks, another forward, a custom
    attention function, a transform of torch.func, or a mode that sees each operation."""
    OFFLOADED = "offloaded"
    """The tower's parameters are not all on one device."""
    OUTER_TRACE = "outer_trace"
    """The call is part of another trace, by `torch.compile` for example, which takes the tower as it is."""
    UNCAPTURED_OUTPUT = "uncaptured_output"
    """An output was read that captures do not make, such as hidden states: the tower computed it."""


BY_THE_TOWER = frozenset({MissReason.TRAINING, MissReason.FOREIGN_CODE, MissReason.AUTOCAST})
"""Why nothing but the tower's own forward may serve."""


# --- items

# Columns are gathered without a line of Python for each item.
_SPEC, _FRAMES, _SEGMENTS = map(attrgetter, ("spec", "frames", "segments"))
_OUTPUT_TOKENS = attrgetter("output_tokens")


# A tuple is made in less than half of the time of a frozen dataclass, and a request may have many items.
class Item(NamedTuple):
    """One image or video of a request."""

    spec: EncoderItemSpec
    frames: int = 0
    """Of a video; 0 for an image."""
    segments: int = 1
    """Attention segments: 1 for an image, of a video as a rule its frames."""
    axis_keys: tuple[Hashable, ...] = ()
    """Its key on each capture axis; only items of equal keys share a batch."""
    refusal: MissReason | None = None
    """Why it is never replayed; None: it may be."""


class Loads:
    """Columns of the items' sizes, one for each limit of a batch; tokens of the named `paths`."""

    def __init__(self, items: Sequence[Item], paths: Iterable[str]) -> None:
        self.items = items
        specs = list(map(_SPEC, items))
        self.tokens: Mapping[str, list[int]] = {
            path: [spec.get_path_output_tokens(path) for spec in specs] for path in paths
        }
        self.totals: list[int] = list(map(_OUTPUT_TOKENS, specs))
        """Output tokens of every item over all paths."""
        self.frames: list[int] = list(map(_FRAMES, items))
        self.segments: list[int] = list(map(_SEGMENTS, items))

    def __len__(self) -> int:
        return len(self.items)

    def of(self, positions: Sequence[int]) -> Loads:
        """Returns the loads of some of the items."""
        return Loads([self.items[position] for position in positions], self.tokens)


class Capacity(NamedTuple):
    """Limits of a batch of the greedy packings."""

    tokens: Mapping[str, int]
    max_items: int
    """Images and videos, at least 1."""
    max_frames: int = 0
    max_segments: int | None = None
    """Attention segments; None: any number."""


# --- plans

_SHOWN_ITEMS = 8


CaptureSize: TypeAlias = Any
"""Of a capture without padding: a token count, or a tuple of the sizes of a call that has none."""


# A tuple is made in less than half of the time of a frozen dataclass, and a request may have many batches.
class PathPlan(NamedTuple):
    """Budget or fallback of one path of a batch."""

    tokens: int
    """Output tokens of the batch on this path; 0: the path is skipped, or a replay is padding only."""
    budget: int | None = None
    """The budget that is replayed; None: no replay."""
    reason: MissReason | None = None
    """Why the path falls back; None if it is replayed or skipped."""
    eager: bool = False
    """Whether a fallback is the eager forward, and not the compiled program at the exact shape."""
    milliseconds: float | None = None
    """The predicted time on the device; None: not known. At an exact shape a price (`PathCosts.exact`)."""
    sizes: tuple[int, ...] | None = None
    """The sizes of a call without a token count, which select its capture; None: the tokens do."""

    @property
    def size(self) -> CaptureSize:
        """The size of a capture without padding."""
        return self.tokens if self.sizes is None else self.sizes

    def as_dict(self) -> dict[str, Any]:
        """Returns values of JSON."""
        return {
            "tokens": int(self.tokens),
            "budget": self.budget,
            "result": str(self.result),
            "eager": self.eager,
            "milliseconds": self.milliseconds,
        }

    @property
    def skipped(self) -> bool:
        """Whether nothing runs on this path."""
        return self.budget is None and self.reason is None

    @property
    def result(self) -> str:
        """`hit`, `skipped`, or the reason of the miss."""
        return self.reason or ("skipped" if self.skipped else "hit")


class PlannedBatch(NamedTuple):
    """Items that are encoded together."""

    indices: tuple[int, ...]
    """The items' positions in the request, in packed order."""
    paths: Mapping[str, PathPlan]
    output_tokens: int
    """Rows of the items' embeddings, all together."""
    axis_keys: tuple[Hashable, ...] = ()
    milliseconds: float | None = None
    """The predicted time of all paths, and of the host; None: one is not known."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the batch as values of JSON."""
        return {
            "items": list(self.indices),
            "output_tokens": int(self.output_tokens),
            "axis_keys": [str(axis) for axis in self.axis_keys],
            "milliseconds": self.milliseconds,
            "paths": {name: path.as_dict() for name, path in self.paths.items()},
        }

    @property
    def reason(self) -> MissReason | None:
        """Why the items count as misses, the first path's reason; None: every path is a hit or skipped."""
        for path in self.paths.values():
            if path.reason:
                return path.reason
        return None


@dataclass(frozen=True, slots=True)
class Plan:
    """The batches of one request; printing it shows them as a table."""

    batches: tuple[PlannedBatch, ...]
    """In the order in which they run; every item is in exactly one."""
    num_items: int

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

    def by_the_tower(self, reason: MissReason) -> Plan:
        """The same batches, all through the tower's own forward."""
        batches = tuple(
            batch._replace(
                paths={
                    name: path if path.skipped else PathPlan(path.tokens, None, reason, eager=True)
                    for name, path in batch.paths.items()
                }
            )
            for batch in self.batches
        )
        return Plan(batches, self.num_items)

    @property
    def milliseconds(self) -> float | None:
        """The predicted time of all batches; None if one of them is not known."""
        known = [batch.milliseconds for batch in self.batches if batch.milliseconds is not None]
        return sum(known) if len(known) == len(self.batches) else None

    @property
    def padding_fraction(self) -> float:
        """The share of padding in the tokens of all replays; 0.0 without replays."""
        replayed = [p for batch in self.batches for p in batch.paths.values() if p.budget is not None]
        budgets = sum(path.budget or 0 for path in replayed)
        return 1 - sum(path.tokens for path in replayed) / budgets if budgets else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as values of JSON."""
        return {
            "items": self.num_items,
            "hits": self.hits,
            "misses": {str(reason): count for reason, count in self.misses.items()},
            "padding_fraction": self.padding_fraction,
            "milliseconds": self.milliseconds,
            "batches": [batch.as_dict() for batch in self.batches],
        }

    def __str__(self) -> str:
        missed = "".join(f", {count} {reason}" for reason, count in self.misses.items())
        timed = any(path.milliseconds is not None for batch in self.batches for path in batch.paths.values())
        total = f"; {self.milliseconds:.1f} ms predicted" if timed and self.milliseconds is not None else ""
        summary = (
            f"{self.num_items} items in {len(self.batches)} batches: {self.hits} hit{missed}; "
            f"{self.padding_fraction:.1%} padding{total}"
        )
        headers = ["batch", "items", "path", "tokens", "budget", "padding %", "result", "predicted ms"]
        shown = headers if timed else headers[:-1]
        rows = [row[: len(shown)] for n, batch in enumerate(self.batches) for row in _rows(n, batch)]
        return f"{summary}\n{tabulate(rows, shown, floatfmt='.1f', missingval='-')}" if rows else summary


def _rows(number: int, batch: PlannedBatch) -> list[list[object]]:
    shown = ", ".join(map(str, batch.indices[:_SHOWN_ITEMS]))
    hidden = len(batch.indices) - _SHOWN_ITEMS
    items = f"{shown} and {hidden} more" if hidden > 0 else shown
    return [
        [
            *(number, items, name, path.tokens, path.budget),
            100 * (path.budget - path.tokens) / path.budget if path.budget else None,
            *(f"{path.result} (eager)" if path.eager else path.result, path.milliseconds),
        ]
        for name, path in batch.paths.items()
    ]
