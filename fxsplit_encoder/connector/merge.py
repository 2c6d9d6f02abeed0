"""The copies that put the rows of items among a prompt's embeddings: as many for fifty runs as for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder.connector.positions import Run
from fxsplit_encoder.errors import InputError

_Integers = NDArray[np.int64]

_WORD = torch.int64
"""What rows are copied as where they consist of it. torch's kernels for rows that are not one piece take an
element at a time, and a word holds four of bfloat16."""


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
    width, table = out.shape[1], np.array(runs, np.int64).reshape(-1, 4)
    parts = _parts(rows, table, width * (1 + levels))
    _check_places(table, start, start + len(out))
    positions = _positions(table, start, out.device)
    if not parts:
        return MergedRows(positions, out.new_empty(levels, 0, width))
    joined = _joined(parts, out, is_own=levels > 0)
    _copy(joined[:, :width], table, positions, out, start)
    return MergedRows(positions, joined[:, width:].view(len(joined), levels, width).transpose(0, 1))


def _parts(rows: Sequence[Tensor | None], table: _Integers, columns: int) -> list[Tensor]:
    """The rows of all runs in as few pieces as they are in.

    Raises:
        InputError: rows are not as many or as wide as they have to be.
    """
    if not len(table):
        return []
    items, firsts, _, lengths = table.T
    goes_on = (items[1:] == items[:-1]) & (firsts[1:] == (firsts + lengths)[:-1])
    begins = np.flatnonzero(np.r_[True, ~goes_on])
    counts = np.add.reduceat(lengths, begins)
    parts = []
    for item, first, count in np.stack((items[begins], firsts[begins], counts), 1).tolist():
        own, stop = rows[item], first + count
        shape = None if own is None else own.shape
        if own is None or shape is None or len(shape) != 2 or shape[0] < stop or shape[1] != columns:
            got = "none" if shape is None else str(tuple(shape))
            raise InputError(f"item {item}: expected rows of ({stop} or more, {columns}); got {got}")
        parts.append(own[first:stop])
    return parts


def _check_places(table: _Integers, start: int, stop: int) -> None:
    """Raises InputError for a run that is not within the positions from `start` up to `stop`."""
    _, _, positions, lengths = table.T
    outside = np.flatnonzero((positions < start) | (positions + lengths > stop))
    if len(outside):
        first, length = int(positions[outside[0]]), int(lengths[outside[0]])
        raise InputError(
            f"out: expected embeddings of positions {first} to {first + length}; got {start} to {stop}"
        )


def _positions(table: _Integers, start: int, device: torch.device) -> Tensor:
    """Where the rows of all runs go, counted from `start`."""
    if len(table) == 1:  # made where it is needed
        _, _, position, length = table[0].tolist()
        return torch.arange(position - start, position - start + length, device=device)
    _, _, positions, lengths = table.T
    before = np.cumsum(lengths) - lengths
    made = np.repeat(positions - start - before, lengths) + np.arange(lengths.sum())
    return to_device(torch.from_numpy(made), device)


def _joined(parts: Sequence[Tensor], out: Tensor, *, is_own: bool) -> Tensor:
    """Pieces one after the other, on the device and in the dtype of `out`.

    Args:
        is_own: whether they must not be the items' own memory.
    """
    moved = [part.to(out.device, out.dtype, non_blocking=True) for part in parts]
    # Of one tensor, too, `cat` makes another.
    return torch.cat(moved) if len(moved) > 1 or (is_own and moved[0] is parts[0]) else moved[0]


def _copy(main: Tensor, table: _Integers, positions: Tensor, out: Tensor, start: int) -> None:
    """Rows to their positions in `out`, by one copy."""
    if _have_words(main, out):
        main, out = main.view(_WORD), out.view(_WORD)
    if len(table) == 1:
        _, _, position, length = table[0].tolist()
        out[position - start : position - start + length].copy_(main)
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
