"""Where the rows of a request's items belong among the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxsplit_encoder.connector.seams import Modality
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown

Integers = NDArray[np.int64]

_TEXT = -1
_KEPT_LAYOUTS = 4


class Run(NamedTuple):
    """Neighboring rows of one item that go to neighboring positions."""

    item: int
    row: int
    position: int
    """Of the first row, in the merged sequence."""
    length: int


class Placeholders(Protocol):
    """Where a prompt shows its items. Token counts are those of the ticket: an item of 0 is left out."""

    def merged_length(self, token_counts: Sequence[int]) -> int:
        """Positions of the merged sequence."""
        ...

    def runs(self, token_counts: Sequence[int], start: int, stop: int) -> Sequence[Run]:
        """What goes to the positions from `start` up to `stop`, in order.

        Raises:
            InputError: the counts are not what the prompt has placeholders for.
        """
        ...


@dataclass(frozen=True)
class Placeholder:
    """The token that stands for the rows of a modality."""

    token: int
    begin: int | None = None
    """The token before each run of them, such as `<|vision_start|>`: where an item is left out, it goes
    too."""
    end: int | None = None
    """The token after each run of them."""


class PositionMap:
    """A prompt with placeholder tokens, each modality's either single or expanded.

    Single: one token for every item, which becomes as many as the item has rows. Expanded: as many tokens as
    the items have rows together, in the order of the items; those of one item need not be neighbors (there
    may be times between a video's frames), and those of two may be. Their number shows which of both it is.

    Args:
        token_ids: of the prompt.
        modalities: of every item of the request, in the order in which the prompt shows those of a modality.
        placeholders: for each modality that the request has.
        token_counts: that the prompt was expanded for. With them an item may later have another number of
            rows, as after it was reduced, if its tokens are neighbors; or none. Without them, none only
            together with all others of its modality.

    Raises:
        InputError: two modalities have the same token, an item's has none, or `token_counts` are not what the
            prompt has placeholders for.
    """

    def __init__(
        self,
        token_ids: ArrayLike,
        modalities: Sequence[Modality],
        placeholders: Mapping[Modality, Placeholder | int],
        token_counts: Sequence[int] | None = None,
    ) -> None:
        self.prompt_ids: Integers = np.asarray(token_ids, np.int64)
        if self.prompt_ids.ndim != 1:
            raise InputError(f"token_ids: expected one prompt; got the shape {self.prompt_ids.shape}")
        self.modalities = tuple(modalities)
        self._placeholders = _checked(placeholders, self.modalities)
        self._announced: Integers | None = None
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        if token_counts is not None:
            self.merged_length(token_counts)
            self._announced = np.array(token_counts, np.int64)

    def merged_length(self, token_counts: Sequence[int]) -> int:
        """Positions of the merged sequence.

        Raises:
            InputError: the counts are not what the prompt has placeholders for.
        """
        return len(self._layout(token_counts).token_ids)

    def runs(self, token_counts: Sequence[int], start: int, stop: int) -> list[Run]:
        """What goes to the positions from `start` up to `stop`, in order.

        Raises:
            InputError: the counts are not what the prompt has placeholders for.
        """
        return self._layout(token_counts).between(start, stop)

    def token_ids(self, token_counts: Sequence[int]) -> Integers:
        """The token at every position of the merged sequence, (length,).

        Raises:
            InputError: the counts are not what the prompt has placeholders for.
        """
        return self._layout(token_counts).token_ids.copy()

    def _layout(self, token_counts: Sequence[int]) -> _Layout:
        key = tuple(int(count) for count in token_counts)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _KEPT_LAYOUTS:
                self._layouts = {}
            found = self._layouts[key] = self._make(key)
        return found

    def _make(self, key: tuple[int, ...]) -> _Layout:
        if len(key) != len(self.modalities) or min(key, default=0) < 0:
            expected = f"{len(self.modalities)} of at least 0, one for each item"
            raise InputError(f"token_counts: expected {expected}; got {shown(key)}")
        counts = np.array(key, np.int64)
        owner = np.full(len(self.prompt_ids), _TEXT)
        times = np.ones(len(self.prompt_ids), np.int64)
        """How often every token of the prompt comes."""
        for modality, placeholder in self._placeholders.items():
            items = np.array([i for i, own in enumerate(self.modalities) if own == modality], np.int64)
            where = np.flatnonzero(self.prompt_ids == placeholder.token)
            announced = None if self._announced is None else self._announced[items]
            owned, times[where] = _assign(modality, where, counts[items], announced)
            owner[where] = items[owned]
            self._leave_out_frames(placeholder, where[counts[owner[where]] == 0], times)
        return _Layout.of(self.prompt_ids, owner, times)

    def _leave_out_frames(self, placeholder: Placeholder, where: Integers, times: Integers) -> None:
        """The tokens around the runs of items that are left out, where they are the modality's own."""
        for token, neighbors in ((placeholder.begin, where - 1), (placeholder.end, where + 1)):
            if token is not None:
                inside = neighbors[(neighbors >= 0) & (neighbors < len(self.prompt_ids))]
                times[inside[self.prompt_ids[inside] == token]] = 0


def _checked(
    placeholders: Mapping[Modality, Placeholder | int], modalities: Sequence[Modality]
) -> dict[Modality, Placeholder]:
    given = {
        modality: placeholder if isinstance(placeholder, Placeholder) else Placeholder(placeholder)
        for modality, placeholder in placeholders.items()
    }
    tokens = {placeholder.token for placeholder in given.values()}
    if not set(modalities) <= given.keys() or len(tokens) != len(given):
        wanted = ", ".join(sorted({*modalities, *given}))
        raise InputError(
            f"placeholders: expected a token of its own for each of {wanted}; got {shown(given)}"
        )
    return given


def _assign(
    modality: Modality, where: Integers, counts: Integers, announced: Integers | None
) -> tuple[Integers, Integers]:
    """Which of a modality's items every one of its placeholder tokens belongs to, and how often it comes.

    Args:
        modality: for messages.
        where: its tokens, rising.
        counts: rows of its items.
        announced: the rows that the prompt was expanded for; None: not known.
    """
    items = np.arange(len(counts))
    if len(where) == len(items):
        return items, counts
    if announced is None and counts.sum() == len(where):
        announced = counts
    if announced is None and len(items) and not counts.any():
        return np.zeros_like(where), np.zeros_like(where)
    if announced is None or announced.sum() != len(where):
        raise InputError(
            f"placeholders: expected {len(items)} {modality} tokens, one for each item, or {counts.sum()}, "
            f"one for each row; got {len(where)}"
        )
    owned = np.repeat(items, announced)
    times = np.ones_like(where)
    for item in np.flatnonzero(counts != announced):
        own = where[owned == item]
        if counts[item] and (not len(own) or own[-1] - own[0] >= len(own)):
            raise InputError(
                f"token_counts: {modality} {item} has {counts[item]} rows where the prompt was expanded for "
                f"{len(own)}, not in one place; expand another prompt for it"
            )
        times[owned == item] = 0
        times[np.flatnonzero(owned == item)[:1]] = counts[item]
    return owned, times


@dataclass(frozen=True, eq=False)
class _Layout:
    """The merged sequence for certain token counts. The four columns describe its runs, by position."""

    token_ids: Integers
    items: Integers
    rows: Integers
    positions: Integers
    lengths: Integers

    @classmethod
    def of(cls, prompt_ids: Integers, owner: Integers, times: Integers) -> _Layout:
        """From the item that every token of the prompt belongs to, and how often it comes."""
        merged = np.repeat(owner, times)
        begins = np.flatnonzero(np.diff(merged, prepend=_TEXT - 1))
        lengths = np.diff(begins, append=len(merged))
        is_item = merged[begins] != _TEXT
        begins, lengths = begins[is_item], lengths[is_item]
        items = merged[begins]
        # A run goes on where the item's run before it ended.
        order = np.argsort(items, kind="stable")
        ends = np.cumsum(lengths[order])
        firsts = np.flatnonzero(np.diff(items[order], prepend=_TEXT))
        before = np.repeat((ends - lengths[order])[firsts], np.diff(firsts, append=len(items)))
        rows = np.empty_like(lengths)
        rows[order] = ends - lengths[order] - before
        return cls(np.repeat(prompt_ids, times), items, rows, begins, lengths)

    def between(self, start: int, stop: int) -> list[Run]:
        """The runs, or parts of them, from position `start` up to `stop`."""
        first = int(np.searchsorted(self.positions + self.lengths, start, side="right"))
        last = int(np.searchsorted(self.positions, stop, side="left"))
        columns = (self.items, self.rows, self.positions, self.lengths)
        found = []
        for item, row, position, length in zip(*(c[first:last].tolist() for c in columns), strict=True):
            low, high = max(position, start), min(position + length, stop)
            if low < high:
                found.append(Run(item, row + low - position, low, high - low))
        return found
