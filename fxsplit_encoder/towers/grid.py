"""Computes segments, positions, permutations, and taps into a learned position table of packed grids (t, h,
w), on the host. Patches come frame by frame, within a frame by blocks of merge x merge patches, those of an
output token. Taps are rows of the table near a patch and their weights; the graph adds up the rows.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fxsplit_encoder.compile.rewriting import permute_rows
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.inputs import integer_rows

Grid = tuple[int, int, int]
"""(frames after temporal merging, patch rows, patch columns) of an image (one frame) or a video."""


def read_grids(grid_thw: Any, merge_size: int, name: str = "grid_thw") -> list[Grid]:
    """The grids of a batch as Python numbers, from (items, 3) integers: a tensor, an array or sequences. One
    on a device costs a synchronization. InputError for sizes that are not positive multiples of `merge_size`.
    """
    rows = integer_rows(grid_thw, name, 3, "rows of three integers (frames, height, width) in patches")
    grids = [(t, h, w) for t, h, w in rows]
    for t, h, w in grids:
        if t < 1 or h < 1 or w < 1 or h % merge_size or w % merge_size:
            raise InputError(
                f"{name}: expected at least 1 frame and a height and width that are positive multiples of "
                f"the merge size {merge_size} in patches; got {(t, h, w)}"
            )
    return grids


def patch_sizes(config: Any) -> dict[str, int]:
    """`merge_size` and `patch_features` of `PackedTower`, from a configuration of the Qwen line or of GLM."""
    features = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return {"merge_size": config.spatial_merge_size, "patch_features": features}


def count_patches(grids: Sequence[Grid]) -> int:
    """Patches (rows) of a batch."""
    return sum(t * h * w for t, h, w in grids)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of every frame, the segments of attention."""
    return [h * w for t, h, w in grids for _ in range(t)]


def cumulative_lengths(lengths: Sequence[int]) -> NDArray[np.int32]:
    """(segments + 1,) int32, rising from 0."""
    result = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=result[1:])
    return result


@lru_cache(maxsize=1024)
def frame_positions(height: int, width: int, merge_size: int) -> NDArray[np.int64]:
    """(height * width, 2): row and column of every patch of one frame, in merge-block order."""
    block_rows, block_columns = height // merge_size, width // merge_size
    result = np.empty((block_rows, block_columns, merge_size, merge_size, 2), dtype=np.int64)
    result[..., 0] = np.arange(height).reshape(block_rows, 1, merge_size, 1)
    result[..., 1] = np.arange(width).reshape(1, block_columns, 1, merge_size)
    return result.reshape(-1, 2)


@lru_cache(maxsize=1024)
def frame_windows(
    height: int, width: int, merge_size: int, window: int
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Cuts a frame into windows of window x window output tokens, smaller ones at its right and lower edge.
    Returns its patches, in merge-block order, in the order of windows, and the number in every window.
    """
    rows, columns = height // merge_size, width // merge_size
    row, column = np.divmod(np.arange(rows * columns), columns)
    window_of_token = row // window * -(-columns // window) + column // window
    tokens = np.argsort(window_of_token, kind="stable")
    unit = merge_size**2
    patches = (tokens[:, None] * unit + np.arange(unit)).reshape(-1)
    return patches.astype(np.int64), tuple((np.bincount(window_of_token) * unit).tolist())


def positions(grids: Sequence[Grid], merge_size: int) -> torch.Tensor:
    """(patches, 2) int64: row and column of every patch of a batch."""
    frames = [frame_positions(h, w, merge_size) for t, h, w in grids for _ in range(t)]
    return concatenate(frames, 2, np.int64)


def window_permutation(grids: Sequence[Grid], merge_size: int, window: int) -> torch.Tensor:
    """(patches,) int64: the patches of a batch in the order of windows, within each frame."""
    return _permutation([frame_windows(h, w, merge_size, window)[0] for t, h, w in grids for _ in range(t)])


def _permutation(frames: Sequence[NDArray[np.int64]]) -> torch.Tensor:
    """The permutation of a batch from those of its frames."""
    starts = np.cumsum([0, *map(len, frames)])
    parts = [permutation + start for start, permutation in zip(starts, frames, strict=False)]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))


def window_lengths(grids: Sequence[Grid], merge_size: int, window: int) -> list[int]:
    """Patches of every window, in the order of `window_permutation`."""
    windows = [frame_windows(h, w, merge_size, window)[1] for t, h, w in grids for _ in range(t)]
    return list(itertools.chain.from_iterable(windows))


@lru_cache(maxsize=1024)
def frame_merge_permutation(height: int, width: int, merge_size: int) -> NDArray[np.int64]:
    """(height * width,): the raster positions of a frame's patches, block by block of merge x merge."""
    positions = frame_positions(height, width, merge_size)
    return positions[:, 0] * width + positions[:, 1]


def merge_permutation(grids: Sequence[Grid], merge_size: int) -> torch.Tensor:
    """(patches,) int64: rows of a batch in the order in which they merge; frames and items keep theirs."""
    return _permutation([frame_merge_permutation(h, w, merge_size) for t, h, w in grids for _ in range(t)])


def merge(hidden: Tensor, permutation: Tensor, rows_per_token: int) -> Tensor:
    """(patches, hidden) to (tokens, rows_per_token, hidden), in the order of `merge_permutation`."""
    rows: Tensor = permute_rows(hidden, permutation)
    return rows.view(-1, rows_per_token, hidden.shape[-1])


def concatenate(arrays: list[NDArray[Any]], columns: int, dtype: Any) -> torch.Tensor:
    """(rows, columns) of arrays with this many columns, in memory of its own; no arrays are no rows."""
    # A copy, also of one array: the caches keep theirs.
    return torch.from_numpy(np.concatenate([np.zeros((0, columns), dtype), *arrays]))


# --- a learned table

Mode = Literal["bilinear", "bicubic"]
"""Resamples a position table from 2 or from 4 entries along each axis."""

TAPS: dict[Mode, int] = {"bilinear": 4, "bicubic": 16}
"""Table rows that make one patch's position."""

# The cubic convolution kernel (Keys, 1981) as `torch.nn.functional.interpolate` and `grid_sample` use it.
_KEYS_A = np.float32(-0.75)


def table_columns(mode: Mode) -> dict[str, tuple[int, torch.dtype]]:
    """The `metadata_columns` of `table_metadata`."""
    return {
        "position_ids": (2, torch.int64),
        "interp_indices": (TAPS[mode], torch.int32),
        "interp_weights": (TAPS[mode], torch.float32),
    }


def table_metadata(
    grids: Sequence[Grid], table: tuple[int, int], merge_size: int, align_corners: bool, mode: Mode
) -> dict[str, Tensor]:
    """Positions for a rotary embedding, and the taps of every patch of a batch: indices into the flattened
    position table, int32, and weights, float32, both (patches, taps). `merge_size` is of the blocks in which
    patches come, 1 for row by row; `align_corners` and `mode` are those of `torch.nn.functional.interpolate`.
    """
    frames = [
        frame_interpolation(h, w, table, merge_size, align_corners, mode)
        for t, h, w in grids
        for _ in range(t)
    ]
    return {
        "position_ids": positions(grids, merge_size),
        "interp_indices": concatenate([indices for indices, _ in frames], TAPS[mode], np.int32),
        "interp_weights": concatenate([weights for _, weights in frames], TAPS[mode], np.float32),
    }


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
    taps): those of `torch.nn.functional.interpolate`, in float32 and in its order of operations.
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
    if mode == "bilinear":
        return taps.astype(np.int32), np.maximum(np.float32(1) - distance, np.float32(0))
    return taps.astype(np.int32), _cubic_kernel(distance)


def _cubic_kernel(distance: NDArray[np.float32]) -> NDArray[np.float32]:
    a, d = _KEYS_A, distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, far)


def resample(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """(patches, hidden) at the weights' precision, from a table (entries, hidden) and its taps."""
    # A sum of lookups, one per tap, is a single pointwise kernel when compiled; a reduction over all taps
    # would first write as many rows per patch.
    result = F.embedding(indices[:, 0], table) * weights[:, :1]
    for tap in range(1, weights.shape[1]):
        result = result + F.embedding(indices[:, tap], table) * weights[:, tap : tap + 1]
    return result


# --- a rotary embedding


def gives_angles(rotary: nn.Module) -> bool:
    """Whether a rotary embedding makes angles, as before transformers 5.17, not cosines and sines."""
    return len(inspect.signature(rotary.forward).parameters) == 1


def cosines_and_sines(
    rotary: Any, hidden: Tensor, position_ids: Tensor, *, from_angles: bool
) -> tuple[Tensor, Tensor]:
    """(patches, head_dim) each, from (patches, 2) positions; `from_angles` as of `gives_angles`."""
    if not from_angles:
        return rotary(hidden, position_ids)  # type: ignore[no-any-return]
    angles = rotary(position_ids)
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos(), both_halves.sin()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of neighboring channels of (..., head_dim) by an angle, in float32."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
