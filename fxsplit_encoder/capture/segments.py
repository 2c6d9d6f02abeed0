"""Segments of a padded sequence: how many a budget holds, and how cumulative lengths are extended over the pad rows.

The pad rows are segments too. An attention kernel leaves rows outside every segment unwritten, and reads value rows past
the last one; were those rows garbage that happens to be NaN, real rows would become NaN (capture rule 1). Covered by
segments of their own, they are computed like any row, on every kernel. Attention costs the square of a segment's length, so
the pad rows are spread evenly over all segments that the batch left free.

    rows      0 . . . . . . . . . n . . . . . . . . . . . . B
    segments  [ image ][ image    ][ pad ][ pad ][ pad ][ pad ]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fxsplit_encoder.errors import InputError, ReplayError

if TYPE_CHECKING:
    from torch import Tensor

# An image or frame of a served model seldom has fewer output tokens (224 x 224 pixels in Qwen3-VL have 49). Every segment of
# a capture costs attention thread blocks, used or not: 32 empty ones slow FlashAttention 2 from 26.8 to 44.4 microseconds
# at 784 tokens (H200).
_TYPICAL_SEGMENT_TOKENS = 64
_MIN_SEGMENTS = 4


def segment_capacity(token_budget: int, max_segments: int) -> int:
    """Real segments (images, frames) that the capture of a budget holds; one more is kept for padding.

    Args:
        token_budget: output tokens.
        max_segments: the most segments that any batch may have.
    """
    return max(1, min(max_segments, max(_MIN_SEGMENTS, token_budget // _TYPICAL_SEGMENT_TOKENS)))


def pad_cu_seqlens(cu_seqlens: Tensor, length: int, rows: int) -> Tensor:
    """Extends cumulative lengths to `length` entries that end at `rows`, on the host.

    Args:
        cu_seqlens: (segments + 1,) int32 CPU tensor rising from 0; repeated last entries (empty segments) are dropped.
        length: entries of the captured buffer.
        rows: rows of the captured sequence, all of which the result covers.

    Raises:
        InputError: the lengths fall, or do not start at 0.
        ReplayError: more segments or rows than the capture has.
    """
    given = cu_seqlens.numpy()
    if given.size < 1 or given[0] != 0 or (np.diff(given) < 0).any():
        raise InputError(f"cu_seqlens: expected entries that rise from 0; got {given[:8].tolist()}...")
    real = int(given[-1])
    segments = int(np.searchsorted(given, real))
    if real > rows or segments + (real < rows) > length - 1:
        raise ReplayError(
            f"cu_seqlens: {segments} segments over {real} rows do not fit a capture of {length - 1} segments over {rows} rows"
        )
    result = np.empty(length, dtype=np.int32)
    result[: segments + 1] = given[: segments + 1]
    result[segments:] = np.linspace(real, rows, length - segments).astype(np.int32)
    return torch.from_numpy(result)


def pad_cu_seqlens_on_device(cu_seqlens: Tensor, length: int, rows: int) -> Tensor:
    """`pad_cu_seqlens` where the lengths are on a device: without a host read, so their values go unchecked.

    Raises:
        ReplayError: more entries than the capture has.
    """
    spare = length - cu_seqlens.shape[0]
    if spare < 0:
        raise ReplayError(f"cu_seqlens: {cu_seqlens.shape[0]} entries do not fit a capture of {length}")
    if spare == 0:
        return cu_seqlens
    real = cu_seqlens[-1]
    steps = torch.arange(1, spare + 1, device=cu_seqlens.device, dtype=torch.int64)
    tail = real + (rows - real) * steps // spare
    return torch.cat([cu_seqlens, tail.to(cu_seqlens.dtype)])


def longest_segment(cu_seqlens: Tensor) -> int:
    """The longest segment of CPU cumulative lengths; 0 without any."""
    lengths = np.diff(cu_seqlens.numpy())
    return int(lengths.max()) if lengths.size else 0


def fits(num_segments: int, num_rows: int, length: int, rows: int) -> bool:
    """Whether a batch fits cumulative lengths of `length` entries over `rows` rows, its padding included."""
    return num_rows <= rows and num_segments + (num_rows < rows) <= length - 1
