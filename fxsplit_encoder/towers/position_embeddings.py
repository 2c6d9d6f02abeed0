"""What positions add to a patch: rows of a learned table, resampled, and rotary cosines and sines. The host
computes which rows ("taps") of the table are near a patch and their weights; the graph adds up the rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fxsplit_encoder.towers.grid import Grid, concatenate

# --- a learned table

Mode = Literal["bilinear", "bicubic"]
"""How a position table is resampled: from 2 or from 4 entries along each axis."""

TAPS: dict[Mode, int] = {"bilinear": 4, "bicubic": 16}
"""Table rows that make one patch's position."""

# The cubic convolution kernel (Keys, 1981) as `torch.nn.functional.interpolate` and `grid_sample` use it.
_KEYS_A = np.float32(-0.75)


def interpolation(
    grids: Sequence[Grid], table: tuple[int, int], merge_size: int, align_corners: bool, mode: Mode
) -> tuple[Tensor, Tensor]:
    """The taps of every patch of a batch: indices into the flattened table, int32, and weights, float32, both
    (patches, taps). `merge_size` is of the blocks in which patches come, 1 for row by row; `align_corners`
    and `mode` are those of `torch.nn.functional.interpolate`.
    """
    frames = [
        frame_interpolation(h, w, table, merge_size, align_corners, mode)
        for t, h, w in grids
        for _ in range(t)
    ]
    return (
        concatenate([indices for indices, _ in frames], TAPS[mode], np.int32),
        concatenate([weights for _, weights in frames], TAPS[mode], np.float32),
    )


# An entry is at most 128 bytes per patch.
@lru_cache(maxsize=256)
def frame_interpolation(
    height: int, width: int, table: tuple[int, int], merge_size: int, align_corners: bool, mode: Mode
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The taps of one frame, (height * width, taps), in merge-block order."""
    row_taps, row_weights = _axis_taps(height, table[0], align_corners, mode)
    column_taps, column_weights = _axis_taps(width, table[1], align_corners, mode)
    # (block row, block column, row, column, tap of the row, tap of the column)
    of_rows = (height // merge_size, 1, merge_size, 1, -1, 1)
    of_columns = (1, width // merge_size, 1, merge_size, 1, row_taps.shape[1])
    indices = (row_taps * np.int32(table[1])).reshape(of_rows) + column_taps.reshape(of_columns)
    weights = row_weights.reshape(of_rows) * column_weights.reshape(of_columns)
    return indices.reshape(-1, TAPS[mode]), weights.reshape(-1, TAPS[mode])


# Sides of images recur where whole sizes do not.
@lru_cache(maxsize=1024)
def _axis_taps(
    size: int, side: int, align_corners: bool, mode: Mode
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The nearest of `side` table positions for each of `size` targets along one axis, and weights, (size,
    taps). In float32 and in the order of operations of `torch.nn.functional.interpolate`, whose weights
    they are.
    """
    target = np.arange(size, dtype=np.float32)
    if align_corners:
        source = target * np.float32(side - 1) / np.float32(max(size - 1, 1))
    else:
        source = (target + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
    floor = np.floor(source)
    offsets = np.arange(2) if mode == "bilinear" else np.arange(-1, 3)
    taps = np.clip(floor.astype(np.int64)[:, None] + offsets, 0, side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
    weights = _linear_kernel(distance) if mode == "bilinear" else _cubic_kernel(distance)
    return taps.astype(np.int32), weights


def _linear_kernel(distance: NDArray[np.float32]) -> NDArray[np.float32]:
    weights: NDArray[np.float32] = np.maximum(np.float32(1) - distance, np.float32(0))
    return weights


def _cubic_kernel(distance: NDArray[np.float32]) -> NDArray[np.float32]:
    a, d = _KEYS_A, distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, far)


# --- a rotary embedding


def gives_angles(rotary: nn.Module) -> bool:
    """Whether a rotary embedding makes angles of positions, as before transformers 5.17; later ones make
    cosines and sines.
    """
    return len(inspect.signature(rotary.forward).parameters) == 1


def cosines_and_sines(
    rotary: Any, hidden: Tensor, position_ids: Tensor, *, from_angles: bool
) -> tuple[Tensor, Tensor]:
    """(patches, head_dim) each, from (patches, 2) positions. Before 5.17 (`from_angles`) each is for both
    halves of a head.
    """
    if not from_angles:
        return rotary(hidden, position_ids)  # type: ignore[no-any-return]
    angles = rotary(position_ids)
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos(), both_halves.sin()
