"""The copies that put the rows of items among a prompt's embeddings: as many for fifty runs as for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder.connector.positions import Run
from fxsplit_encoder.errors import InputError

_NONE = np.empty(0, np.int64)
_FEW = 16
"""Up to so many runs their positions are made one after the other."""

_WORD = torch.int64
"""What rows are copied as where they consist of it. torch's kernels for rows that are not one piece take an
element at a time, and a word holds four of bfloat16."""


class FeatureRows(NamedTuple):
    """The rows of one item, for as long as they are read."""

    rows: Tensor
    """(tokens, width), on the device that encoded them or in pinned host memory."""
    metadata: Mapping[str, Any]
    """What travels with them, such as the grid."""


@dataclass(frozen=True, eq=False)
class MergedRows:
    """What a model takes besides embeddings for the rows of items in a range of tokens."""

    positions: Tensor
    """(rows,): where they are, counted from the beginning of the range, rising; int64, on the device."""

    levels: Tensor
    """(levels, rows, width): of every deepstack level, those rows in that order, in memory of their own:
    the levels of a row are neighbors there."""


def merge_rows(
    rows: Sequence[Tensor | None], runs: Sequence[Run], out: Tensor, start: int, levels: int = 0
) -> MergedRows:
    """Copies the main output's rows to their places, and hands out the deepstack levels that belong to them.

    Nothing waits for the device. Rows of another dtype or device are converted.

    Args:
        rows: of each item, (tokens, width * (1 + levels)): the main output, then every level.
        runs: what belongs into the range, by position.
        out: (positions, width), embeddings of the range; written in place.
        start: its first position in the merged sequence.
        levels: how many follow the main output.

    Raises:
        InputError: rows are not as many or as wide as they have to be; nothing is written then.
    """
    if out.dim() != 2:
        raise InputError(f"out: expected embeddings, (positions, width); got {tuple(out.shape)}")
    width = out.shape[1]
    pieces = _pieces(runs, start, start + len(out))
    parts = [_part(rows[item], item, first, stop, width * (1 + levels)) for item, first, stop in pieces]
    if not parts:
        return MergedRows(_positions(runs, start, out.device), out.new_empty(levels, 0, width))
    joined = _joined(parts, out, is_own=levels > 0)  # while the device does that, the host counts positions
    positions = _positions(runs, start, out.device)
    _copy(joined[:, :width], runs, positions, out, start)
    return MergedRows(positions, joined[:, width:].view(len(joined), levels, width).transpose(0, 1))


def _pieces(runs: Sequence[Run], start: int, stop: int) -> list[tuple[int, int, int]]:
    """The runs in as few pieces as their rows are in: the item, the first row and the one after the last.

    Raises:
        InputError: a run is not within the positions from `start` up to `stop`.
    """
    # For a few hundred runs this takes less than making an array of them.
    pieces = []
    current, first, end = -1, 0, 0
    for item, row, position, length in runs:
        if position < start or position + length > stop:
            raise InputError(
                f"out: expected embeddings of positions {position} to {position + length}; got {start} to "
                f"{stop}"
            )
        if item != current or row != end:
            if end > first:
                pieces.append((current, first, end))
            current, first = item, row
        end = row + length
    if end > first:
        pieces.append((current, first, end))
    return pieces


def _part(own: Tensor | None, item: int, first: int, stop: int, columns: int) -> Tensor:
    """Some rows of an item.

    Raises:
        InputError: it has not as many, or not as wide ones.
    """
    shape = () if own is None else own.shape
    if own is None or len(shape) != 2 or shape[0] < stop or shape[1] != columns:
        got = "none" if own is None else str(tuple(shape))
        raise InputError(f"item {item}: expected rows of ({stop} or more, {columns}); got {got}")
    return own if first == 0 and stop == shape[0] else own[first:stop]


def _positions(runs: Sequence[Run], start: int, device: torch.device) -> Tensor:
    """Where the rows of all runs go, counted from `start`."""
    if len(runs) == 1:  # made where it is needed
        return torch.arange(
            runs[0].position - start, runs[0].position - start + runs[0].length, device=device
        )
    if len(runs) <= _FEW:
        made = np.concatenate([_NONE, *(np.arange(run[2] - start, run[2] - start + run[3]) for run in runs)])
    else:
        begins, lengths = np.array([run[2] for run in runs]), np.array([run[3] for run in runs])
        made = np.repeat(begins - start - (np.cumsum(lengths) - lengths), lengths)
        made += np.arange(len(made))
    return to_device(torch.from_numpy(made), device)


def _joined(parts: Sequence[Tensor], out: Tensor, *, is_own: bool) -> Tensor:
    """Pieces one after the other, on the device and in the dtype of `out`.

    Args:
        is_own: whether they must not be the items' own memory.
    """
    device, dtype = out.device, out.dtype
    may_wait = (
        device.type != "cpu"
    )  # the host does not wait for a copy that comes to it, and would read too early
    moved = [
        part
        if part.dtype == dtype and part.device == device
        else part.to(device, dtype, non_blocking=may_wait)
        for part in parts
    ]
    # Of one tensor, too, `cat` makes another.
    return torch.cat(moved) if len(moved) > 1 or (is_own and moved[0] is parts[0]) else moved[0]


def _copy(main: Tensor, runs: Sequence[Run], positions: Tensor, out: Tensor, start: int) -> None:
    """Rows to their positions in `out`, by one copy."""
    if _have_words(main, out):
        main, out = main.view(_WORD), out.view(_WORD)
    if len(runs) == 1:
        position = runs[0].position - start
        out[position : position + runs[0].length].copy_(main)
    else:
        out.index_copy_(0, positions, main)


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
