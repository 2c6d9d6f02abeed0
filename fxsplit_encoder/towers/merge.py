"""Merging patches that come in raster order into output tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid


@lru_cache(maxsize=1024)
def frame_merge_order(height: int, width: int, merge_size: int) -> NDArray[np.int64]:
    """(height * width,): the raster positions of a frame's patches, block by block of merge x merge."""
    positions = grids_of.frame_positions(height, width, merge_size)
    return positions[:, 0] * width + positions[:, 1]


def merge_order(grids: Sequence[Grid], merge_size: int) -> Tensor:
    """(patches,) int64: the rows of a batch in the order in which they merge.

    The patches of one output token of one frame follow one another; frames and items keep their order.
    """
    sizes = grids_of.frame_lengths(grids)
    starts = grids_of.cumulative_lengths(sizes)[:-1]
    shapes = [(h, w) for t, h, w in grids for _ in range(t)]
    orders = [
        start + frame_merge_order(h, w, merge_size) for start, (h, w) in zip(starts, shapes, strict=True)
    ]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *orders]))


def mean_frames(tokens: Tensor, grids: Sequence[Grid], rows_per_token: int) -> list[Tensor]:
    """Every item's output tokens: views for images, means over the frames of clips.

    Args:
        tokens: (tokens of all frames or more, ...), item by item.
    """
    counts = [t * h * w // rows_per_token for t, h, w in grids]
    items = torch.split(tokens[: sum(counts)], counts)
    return [
        item.view(t, -1, *item.shape[1:]).mean(0) if t > 1 else item
        for item, (t, _, _) in zip(items, grids, strict=True)
    ]
