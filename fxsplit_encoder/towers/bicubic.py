"""Bicubic resampling of a learned position table, as 16 table rows and their weights for every patch.

The host computes which rows and weights (they follow from the grids alone); the graph adds up the rows. So
no interpolation, and no loop over images, is in the graph.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from fxsplit_encoder.towers.grid import Grid

TAPS = 16
"""Table rows that make one patch's position: 4 along each axis."""

# Keys' cubic convolution kernel, with the parameter that torch.nn.functional.interpolate uses.
_KEYS = -0.75


# One entry is 128 bytes a patch.
@lru_cache(maxsize=256)
def frame_bicubic(
    height: int, width: int, table_height: int, table_width: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The taps of one frame, as of `F.interpolate(mode="bicubic", align_corners=False)`.

    Coordinates are in double precision: in single precision, they move the result by up to 4e-5 of the
    table's values.

    Returns:
        Indices into the flattened table and their weights, both (height * width, 16), in raster order.
    """
    rows, row_weights = _axis_taps(height, table_height)
    columns, column_weights = _axis_taps(width, table_width)
    indices = rows[:, None, :, None] * table_width + columns[None, :, None, :]
    weights = row_weights[:, None, :, None] * column_weights[None, :, None, :]
    return indices.reshape(-1, TAPS).astype(np.int32), weights.reshape(-1, TAPS).astype(np.float32)


def _axis_taps(size: int, table_size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The four table positions around every target position of an axis, and their weights: (size, 4)."""
    source = (np.arange(size) + 0.5) * table_size / size - 0.5
    nearest = np.floor(source)[:, None] + np.arange(-1, 3)
    distance = np.abs(source[:, None] - nearest)
    inner = ((_KEYS + 2) * distance - (_KEYS + 3)) * distance**2 + 1
    outer = ((_KEYS * distance - 5 * _KEYS) * distance + 8 * _KEYS) * distance - 4 * _KEYS
    taps = np.clip(nearest, 0, table_size - 1).astype(np.int64)
    return taps, np.where(distance <= 1, inner, outer)


def bicubic(grids: Sequence[Grid], table_height: int, table_width: int) -> tuple[Tensor, Tensor]:
    """Table indices (patches, 16) int32 and weights (patches, 16) float32 of a batch, in raster order."""
    frames = [frame_bicubic(h, w, table_height, table_width) for t, h, w in grids for _ in range(t)]
    return (
        _concatenate([indices for indices, _ in frames], np.int32),
        _concatenate([weights for _, weights in frames], np.float32),
    )


def _concatenate(arrays: list[NDArray[Any]], dtype: Any) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros((0, TAPS), dtype), *arrays]))


def resample(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The positions of every patch, (patches, hidden), at the weights' precision.

    Args:
        table: (table_height, table_width, hidden).
        indices, weights: (patches, 16), from `bicubic`.
    """
    rows = table.flatten(0, 1)
    # A sum of lookups, one a tap, is a single pointwise kernel when compiled; a reduction over all taps would
    # first write 16 rows a patch.
    result = F.embedding(indices[:, 0], rows) * weights[:, :1]
    for tap in range(1, TAPS):
        result = result + F.embedding(indices[:, tap], rows) * weights[:, tap : tap + 1]
    return result
