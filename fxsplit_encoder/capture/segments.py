"""Segments of a padded sequence: how many a budget holds, and how cumulative lengths are extended.

    rows      0 . . . . . . . . . n . . . . . . . . . . . . B
    segments  [ image ][ image    ]          (then empty ones)

The pad rows belong to no segment. In a compiled forward masks keep them finite (`compile.masks`), in one that
is captured as it is the attention itself (`capture.eager_attention`).
"""

from __future__ import annotations

import bisect
import itertools
from functools import lru_cache

import torch
from torch import Tensor

from fxsplit_encoder.errors import InputError, ReplayError

# An image or frame of a served model seldom has fewer output tokens (224 x 224 pixels in Qwen3-VL have 49).
# Every segment of a capture costs thread blocks of attention, used or not: with 8 empty segments beside one
# real one FlashAttention 2 took 66 instead of 49 microseconds at 1024 tokens (one H200, 16 heads of 72,
# benchmarks/cases/attention.py).
_TYPICAL_SEGMENT_TOKENS = 32
_MIN_SEGMENTS = 8


def segment_capacity(token_budget: int, max_segments: int) -> int:
    """Segments (images, frames) that the capture of a budget holds.

    Args:
        token_budget: output tokens.
        max_segments: the most segments that any batch may have.
    """
    return max(1, min(max_segments, max(_MIN_SEGMENTS, token_budget // _TYPICAL_SEGMENT_TOKENS)))


def full_cu_seqlens(capacity: int, rows: int, segments: int = 1) -> Tensor:
    """(capacity + 1,) int32: cumulative lengths of `rows` rows in equal segments, then empty ones, with which
    a capture is recorded and timed.
    """
    result = torch.full((capacity + 1,), rows, dtype=torch.int32, device="cpu")
    result[: segments + 1] = torch.arange(segments + 1, device="cpu") * rows // segments
    return result


def pad_cu_seqlens(cu_seqlens: Tensor, length: int, rows: int) -> Tensor:
    """Extends cumulative lengths on the CPU to `length` entries, by empty segments (capture rule 2).

    The result is kept for the next batch of the same lengths: nobody may write to it.

    Args:
        cu_seqlens: (segments + 1,) int32 CPU tensor rising from 0; repeated last entries (empty segments) may
            be dropped.
        length: entries of the captured buffer.
        rows: rows of the captured sequence.

    Raises:
        InputError: the lengths fall, or do not start at 0.
        ReplayError: more segments or rows than the capture has.
    """
    return _extended(tuple(cu_seqlens.tolist()), length, rows)


# A service sees few sizes of images. A batch of a thousand frames takes 8 KiB.
@lru_cache(maxsize=256)
def _extended(given: tuple[int, ...], length: int, rows: int) -> Tensor:
    if not given or given[0] != 0 or any(end < start for start, end in itertools.pairwise(given)):
        raise InputError(f"cu_seqlens: expected entries that rise from 0; got {list(given[:8])}...")
    real = given[-1]
    segments = bisect.bisect_left(given, real)
    if not fits(segments, real, length, rows):
        raise ReplayError(
            f"cu_seqlens: {segments} segments over {real} rows do not fit a capture of {length - 1} "
            f"segments over {rows} rows"
        )
    # In pinned memory it need not be copied on the host before it goes to a device.
    pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    lengths = given[: segments + 1] + (real,) * (length - segments - 1)
    with torch.inference_mode(False):
        return torch.tensor(lengths, dtype=torch.int32, device="cpu", pin_memory=pinned)


def pad_cu_seqlens_on_device(cu_seqlens: Tensor, length: int) -> Tensor:
    """`pad_cu_seqlens` where the lengths are on a device: without a host read, so their values go unchecked.

    Raises:
        ReplayError: more entries than the capture has.
    """
    spare = length - cu_seqlens.shape[0]
    if spare < 0:
        raise ReplayError(f"cu_seqlens: {cu_seqlens.shape[0]} entries do not fit a capture of {length}")
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(spare)]) if spare else cu_seqlens


def fill_cu_seqlens(buffer: Tensor, value: Tensor) -> None:
    """Fills a buffer of cumulative lengths with a batch's, extended by empty segments.

    Raises:
        RuntimeError: more entries than the buffer has.
    """
    entries = value.shape[0]
    if entries == buffer.shape[0]:
        buffer.copy_(value)
        return
    buffer[:entries].copy_(value)
    buffer[entries:].copy_(value[-1:].expand(buffer.shape[0] - entries))


def is_cumulative(tensor: Tensor) -> bool:
    """Whether a tensor looks like cumulative lengths: 32-bit integers that rise from 0."""
    if tensor.dim() != 1 or tensor.dtype != torch.int32 or tensor.shape[0] < 2:
        return False
    entries = tensor.tolist()
    return entries[0] == 0 < entries[-1] and all(a <= b for a, b in itertools.pairwise(entries))


def fits(num_segments: int, num_rows: int, length: int, rows: int) -> bool:
    """Whether a batch fits captured cumulative lengths of `length` entries over `rows` rows."""
    return num_rows <= rows and num_segments <= length - 1
