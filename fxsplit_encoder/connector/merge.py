"""The copies that put the rows of items among a prompt's embeddings: a few for each item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder.connector.positions import Run
from fxsplit_encoder.errors import InputError

_FEW_RUNS = 4
"""Up to so many runs of an item are copied one by one: an index would have to go to the device first."""


@dataclass(frozen=True, eq=False)
class MergedRows:
    """What a model takes besides embeddings for the rows of items in a range of tokens."""

    positions: Tensor
    """(rows,): where they are, counted from the beginning of the range, rising; int64, on the device."""

    levels: Tensor
    """(levels, rows, width): of every deepstack level, those rows in that order."""


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
    check_rows(rows, runs, out, start, levels)
    copy_rows(rows, runs, out, start)
    return MergedRows(_positions(runs, start, out.device), _levels(rows, runs, out, levels))


def check_rows(
    rows: Sequence[Tensor | None], runs: Sequence[Run], out: Tensor, start: int, levels: int = 0
) -> None:
    """Raises InputError unless all rows of the runs exist, have the width, and have a place in `out`."""
    if out.dim() != 2:
        raise InputError(f"out: expected embeddings, (positions, width); got {tuple(out.shape)}")
    columns = out.shape[1] * (1 + levels)
    for item, row, position, length in runs:
        own = rows[item]
        got = "none" if own is None else str(tuple(own.shape))
        if own is None or own.dim() != 2 or own.shape[0] < row + length or own.shape[1] != columns:
            raise InputError(f"item {item}: expected rows of ({row + length} or more, {columns}); got {got}")
        if position < start or position + length > start + len(out):
            raise InputError(
                f"out: expected embeddings of positions {position} to {position + length}; got {start} to "
                f"{start + len(out)}"
            )


def copy_rows(rows: Sequence[Tensor | None], runs: Sequence[Run], out: Tensor, start: int) -> None:
    """Copies runs to their places, without waiting for the device.

    Args:
        rows: of each item, (tokens, width); of more columns than `out` has, the first ones are taken.
        runs: what to copy.
        out: (positions, width), from position `start` on; written in place.
        start: its first position in the merged sequence.
    """
    width = out.shape[1]
    for item, own in groupby(sorted(runs), key=lambda run: run.item):
        source, parts = rows[item], list(own)
        assert source is not None
        if len(parts) <= _FEW_RUNS or not _follow(parts):
            for _, row, position, length in parts:
                target = out[position - start : position - start + length]
                target.copy_(source[row : row + length, :width], non_blocking=True)
        else:
            first, count = parts[0].row, sum(run.length for run in parts)
            main = source[first : first + count, :width].to(out.device, out.dtype, non_blocking=True)
            out.index_copy_(0, _positions(parts, start, out.device), main)


def _follow(runs: Sequence[Run]) -> bool:
    """Whether the rows of each run begin where those before end."""
    return all(run.row + run.length == after.row for run, after in pairwise(runs))


def _positions(runs: Iterable[Run], start: int, device: torch.device) -> Tensor:
    parts = [np.arange(run.position - start, run.position - start + run.length) for run in runs]
    return to_device(torch.from_numpy(np.concatenate(parts or [np.empty(0, np.int64)])), device)


def _levels(rows: Sequence[Tensor | None], runs: Sequence[Run], out: Tensor, levels: int) -> Tensor:
    width, count = out.shape[1], sum(run.length for run in runs)
    made = out.new_empty(levels, count, width)
    done = 0
    for item, row, _, length in runs if levels else ():
        source = rows[item]
        assert source is not None
        further = source[row : row + length, width:].reshape(length, levels, width).transpose(0, 1)
        made[:, done : done + length].copy_(further, non_blocking=True)
        done += length
    return made
