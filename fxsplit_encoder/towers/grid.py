"""Host arithmetic of packed grids, lists of (t, h, w). Patches come frame by frame, within a frame by blocks
of merge x merge patches, so that those of one output token follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.inputs import integer_rows

Grid = tuple[int, int, int]
"""(frames after temporal merging, patch rows, patch columns) of an image (one frame) or a video."""


def read_grids(grid_thw: Any, merge_size: int, name: str = "grid_thw") -> list[Grid]:
    """The grids of a batch as Python numbers.

    Args:
        grid_thw: (items, 3) integers: a tensor, an array or nested sequences; a CUDA tensor costs a
            synchronization.
        merge_size: patches that merge into one output token along each side.

    Raises:
        InputError: another shape, or sizes that are not positive multiples of `merge_size`.
    """
    rows = integer_rows(grid_thw, name, 3, "rows of three integers (frames, height, width) in patches")
    grids = [(t, h, w) for t, h, w in rows]
    for grid in grids:
        _check_grid(grid, merge_size, name)
    return grids


def _check_grid(grid: Grid, merge_size: int, name: str) -> None:
    t, h, w = grid
    if t < 1 or h < 1 or w < 1 or h % merge_size or w % merge_size:
        raise InputError(
            f"{name}: expected at least 1 frame and a height and width that are positive multiples of "
            f"the merge size {merge_size} in patches; got {grid}"
        )


def count_patches(grids: Sequence[Grid]) -> int:
    """Patches (rows) of a batch."""
    return sum(t * h * w for t, h, w in grids)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of every frame: the segments that attend within themselves."""
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
    Returns the patches (places in merge-block order) in the order of windows, and the patches of every
    window.
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
    frames = [(h * w, frame_windows(h, w, merge_size, window)[0]) for t, h, w in grids for _ in range(t)]
    starts = np.cumsum([0, *(patches for patches, _ in frames)])
    parts = [permutation + start for start, (_, permutation) in zip(starts, frames, strict=False)]
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))


def window_lengths(grids: Sequence[Grid], merge_size: int, window: int) -> list[int]:
    """Patches of every window, in the order of `window_permutation`."""
    return [
        patches
        for t, h, w in grids
        for _ in range(t)
        for patches in frame_windows(h, w, merge_size, window)[1]
    ]


@lru_cache(maxsize=1024)
def frame_merge_permutation(height: int, width: int, merge_size: int) -> NDArray[np.int64]:
    """(height * width,): the raster positions of a frame's patches, block by block of merge x merge."""
    positions = frame_positions(height, width, merge_size)
    return positions[:, 0] * width + positions[:, 1]


def merge_permutation(grids: Sequence[Grid], merge_size: int) -> torch.Tensor:
    """(patches,) int64: rows of a batch in the order in which they merge; frames and items keep theirs."""
    sizes = frame_lengths(grids)
    starts = cumulative_lengths(sizes)[:-1]
    shapes = [(h, w) for t, h, w in grids for _ in range(t)]
    parts = [
        start + frame_merge_permutation(h, w, merge_size)
        for start, (h, w) in zip(starts, shapes, strict=True)
    ]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))


def concatenate(arrays: list[NDArray[Any]], columns: int, dtype: Any) -> torch.Tensor:
    """(rows, columns) of arrays with this many columns, in memory of its own; no arrays are no rows."""
    if not arrays:
        return torch.from_numpy(np.zeros((0, columns), dtype=dtype))
    return torch.from_numpy(np.concatenate(arrays))  # a copy, also of one array: the caches keep theirs
