"""Where a request's media tokens are, and features merged into embeddings at their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown

Integers = NDArray[np.int64]

_TEXT = -1
_KEPT_LAYOUTS = 4


class Places(NamedTuple):
    """Where rows of items are in a range of the merged sequence."""

    positions: Integers
    """(rows,), counted from the beginning of the range, rising."""
    pieces: Sequence[tuple[int, int, int]]
    """Item, first row and the one after the last, of what is taken from the items one after the other."""


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
    """A prompt with placeholder tokens. Each modality's are single, one for every item, or expanded, one for
    every row, in the order of the items; their number shows which. An item's expanded tokens need not be
    neighbors: there may be times between a video's frames.

    Args:
        token_ids: of the prompt.
        modalities: of every item of the request, in the order in which the prompt shows those of a modality.
        placeholders: for each modality that the request has.
        token_counts: that the prompt was expanded for. With them an item whose tokens are neighbors may later
            have another number of rows; without them, none only with all others of its modality.

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
        """Positions of the merged sequence; InputError: the counts are not what the prompt was made for."""
        return len(self._layout(token_counts).token_ids)

    def places(self, token_counts: Sequence[int], start: int, stop: int) -> Places:
        """The rows within the positions from `start` up to `stop`; raises as `merged_length`."""
        layout = self._layout(token_counts)
        positions = np.flatnonzero(layout.items[start:stop] != _TEXT)
        items, rows = layout.items[start:stop][positions], layout.rows[start:stop][positions]
        begins = np.flatnonzero(np.diff(items, prepend=_TEXT))
        ends = np.append(begins, len(items))[1:] - 1
        columns = (items[begins], rows[begins], rows[ends] + 1)
        return Places(positions, [*zip(*(each.tolist() for each in columns), strict=True)])

    def token_ids(self, token_counts: Sequence[int]) -> Integers:
        """The token at every position of the merged sequence, (length,); raises as `merged_length`."""
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
        times = np.ones(len(self.prompt_ids), np.int64)
        """How often every token of the prompt comes."""
        indices = {
            modality: np.flatnonzero([each == modality for each in self.modalities])
            for modality in self._placeholders
        }
        for modality, placeholder in self._placeholders.items():
            own = indices[modality]
            where = np.flatnonzero(self.prompt_ids == placeholder.token)
            announced = None if self._announced is None else self._announced[own]
            owned, times[where] = _assign(modality, where, counts[own], announced)
            self._leave_out_frames(placeholder, where[counts[own][owned] == 0], times)
        token_ids = np.repeat(self.prompt_ids, times)
        layout = _Layout(token_ids, np.full_like(token_ids, _TEXT), np.zeros_like(token_ids))
        for modality, placeholder in self._placeholders.items():
            own = indices[modality]
            firsts = np.cumsum(counts[own]) - counts[own]
            merged = np.flatnonzero(token_ids == placeholder.token)
            layout.items[merged] = np.repeat(own, counts[own])
            layout.rows[merged] = np.arange(len(merged)) - np.repeat(firsts, counts[own])
        return layout

    def _leave_out_frames(self, placeholder: Placeholder, where: Integers, times: Integers) -> None:
        """The tokens around the runs of items that are left out, where they are the modality's own."""
        for token, neighbors in ((placeholder.begin, where - 1), (placeholder.end, where + 1)):
            if token is not None:
                inside = neighbors[(neighbors >= 0) & (neighbors < len(self.prompt_ids))]
                times[inside[self.prompt_ids[inside] == token]] = 0


@dataclass(frozen=True, eq=False)
class _Layout:
    """The merged sequence for certain token counts: of every position its token, its item and its row."""

    token_ids: Integers
    items: Integers
    rows: Integers


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
    """Which of a modality's items every one of its placeholder tokens belongs to, and how often it comes."""
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
    _check_borders(modality, where, owned)
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


def _check_borders(modality: Modality, where: Integers, owned: Integers) -> None:
    """InputError: of two items with neighboring tokens one has others elsewhere; these are other counts."""
    for first in np.flatnonzero(np.diff(owned)) + 1:
        if where[first] != where[first - 1] + 1:
            continue
        for item in (owned[first - 1], owned[first]):
            own = where[owned == item]
            if own[-1] - own[0] >= len(own):
                raise InputError(
                    f"token_counts: {modality} {owned[first]} would begin among neighboring tokens, with "
                    f"{modality} {item} in several places; expected a prompt expanded for these counts"
                )


_WORD = torch.int64
"""Rows are copied as such words: torch's kernels for strided rows take an element at a time."""


class FeatureRows(NamedTuple):
    """The rows of one item, for as long as they are read."""

    rows: Tensor
    """(tokens, width), on the device that encoded them or in pinned host memory."""
    metadata: Mapping[str, Any]
    """What travels with them, such as the grid."""


@dataclass(frozen=True, eq=False)
class MergedRows:
    """Inputs of a model besides embeddings, for the rows of items in a range of tokens."""

    positions: Tensor
    """(rows,): where they are, counted from the beginning of the range, rising; int64, on the device."""

    levels: Tensor
    """(levels, rows, width): of every deepstack level, those rows in that order, in memory of their own:
    the levels of a row are neighbors there."""


def merge_rows(rows: Mapping[int, Tensor], places: Places, out: Tensor, levels: int = 0) -> MergedRows:
    """Copies the main output's rows to their places, and returns their deepstack levels; nothing waits for
    the device. Rows of another dtype or device are converted.

    Args:
        rows: of items by index, (tokens, width * (1 + levels)): the main output, then every level.
        places: what belongs into the range.
        out: (positions, width), embeddings of the range; written in place.
        levels: how many follow the main output.

    Raises:
        InputError: rows are not as many or as wide as they have to be; nothing is written then.
    """
    width, positions = out.shape[1], places.positions
    if not len(positions):
        return MergedRows(
            torch.empty(0, dtype=torch.int64, device=out.device), out.new_empty(levels, 0, width)
        )
    columns = width * (1 + levels)
    parts = [_part(rows[item], item, first, stop, columns) for item, first, stop in places.pieces]
    joined = _joined(parts, out, is_own=levels > 0)
    main, first, count = joined[:, :width], int(positions[0]), len(positions)
    if positions[-1] - first + 1 == count:  # neighbors
        where = torch.arange(first, first + count, device=out.device)
        _copy(main, out[first : first + count])
    else:
        where = to_device(torch.from_numpy(positions), out.device)
        _copy(main, out, where)
    return MergedRows(where, joined[:, width:].view(count, levels, width).transpose(0, 1))


def _part(own: Tensor, item: int, first: int, stop: int, columns: int) -> Tensor:
    """Some rows of an item; raises InputError where it has not as many, or not as wide ones."""
    shape = tuple(own.shape)
    if len(shape) != 2 or shape[0] < stop or shape[1] != columns:
        raise InputError(f"item {item}: expected rows of ({stop} or more, {columns}); got {shape}")
    return own if first == 0 and stop == shape[0] else own[first:stop]


def _joined(parts: Sequence[Tensor], out: Tensor, *, is_own: bool) -> Tensor:
    """Pieces one after the other, of the device and dtype of `out`; `is_own`: not in the items' memory."""
    device, dtype = out.device, out.dtype
    may_wait = device.type != "cpu"  # the host does not wait for a copy to it, and would read too early
    moved = [
        part
        if part.dtype == dtype and part.device == device
        else part.to(device, dtype, non_blocking=may_wait)
        for part in parts
    ]
    # Of one tensor, too, `cat` makes another.
    return torch.cat(moved) if len(moved) > 1 or (is_own and moved[0] is parts[0]) else moved[0]


def _copy(rows: Tensor, out: Tensor, where: Tensor | None = None) -> None:
    """Rows to some of `out`, or to all of it, by one copy."""
    if _have_words(rows, out):
        rows, out = rows.view(_WORD), out.view(_WORD)
    if where is None:
        out.copy_(rows)
    else:
        out.index_copy_(0, where, rows)


def _have_words(*tensors: Tensor) -> bool:
    """Whether every row consists of whole words. One that autograd watches has to keep its dtype."""
    return not any(
        tensor.requires_grad
        or tensor.stride(1) != 1
        or any(
            number * tensor.itemsize % _WORD.itemsize
            for number in (tensor.shape[1], tensor.stride(0), tensor.storage_offset())
        )
        for tensor in tensors
    )
