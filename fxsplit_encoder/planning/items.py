"""The items of a request as planning sees them: one by one, and by what they take up together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.protocol import EncoderItemSpec

# Columns are gathered without a line of Python for each item.
_SPEC, _FRAMES, _SEGMENTS = map(attrgetter, ("spec", "frames", "segments"))
_OUTPUT_TOKENS = attrgetter("output_tokens")


# A tuple is made in less than half of the time of a frozen dataclass, and a request may have many items.
class Item(NamedTuple):
    """One image or video of a request."""

    spec: EncoderItemSpec
    """Its size, from the tower."""
    frames: int = 0
    """Video frames; 0 for an image."""
    segments: int = 1
    """Attention segments: 1 for an image, of a video as a rule its frames."""
    axis_keys: tuple[Hashable, ...] = ()
    """Its key on each capture axis; only items of equal keys share a batch."""
    refusal: MissReason | None = None
    """Why it is never replayed; None: it may be."""


class Loads:
    """What items take up, each thing that a batch is limited in as a column: packing adds up columns.

    Args:
        items: those that may share batches.
        paths: the names of the paths on which their tokens count.
    """

    def __init__(self, items: Sequence[Item], paths: Iterable[str]) -> None:
        self.items = items
        self.specs = list(map(_SPEC, items))
        self.tokens: Mapping[str, list[int]] = {
            path: [spec.get_path_output_tokens(path) for spec in self.specs] for path in paths
        }
        """Output tokens of every item, by path."""
        self.totals: list[int] = list(map(_OUTPUT_TOKENS, self.specs))
        """Output tokens of every item over all paths."""
        self.frames: list[int] = list(map(_FRAMES, items))
        self.segments: list[int] = list(map(_SEGMENTS, items))

    def __len__(self) -> int:
        return len(self.items)

    def of(self, positions: Sequence[int]) -> Loads:
        """What some of the items take up."""
        return Loads([self.items[position] for position in positions], self.tokens)


class Capacity(NamedTuple):
    """What a batch of the greedy packings may have."""

    tokens: Mapping[str, int]
    """Output tokens, by path."""
    max_items: int
    """Images and videos, at least 1."""
    max_frames: int = 0
    """Video frames."""
    max_segments: int | None = None
    """Attention segments; None: any number."""
