"""A FlashAttention forward for packed segments in Triton. Imported only where Triton is installed.

The grid has a program for every tile of queries that there can be, whatever the segments.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fxsplit_encoder._torch.triton import driver
from fxsplit_encoder.kernels.attention.builtin import TILE_M, TILE_N

# Warps that share a tile.
_WARPS = 4

# Boundaries that a program reads at once. Every number of them is another compilation.
_BOUNDARIES = (32, 128, 1024)

# Loads of keys and values that overlap.
_STAGES = 3

_LOG2_E = math.log2(math.e)

# Bytes that a pointer may be known to be aligned to.
_ALIGNMENT = 16


@triton.jit  # type: ignore[untyped-decorator]
def _segment_of(tile, cu_seqlens, segments, BLOCK_M: tl.constexpr, BOUNDARIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The only segment that owns a tile: s owns those from cu_seqlens[s] // BLOCK_M + s on."""
    segment = -1
    for first in range(0, segments, BOUNDARIES):
        number = first + tl.arange(0, BOUNDARIES)
        boundary = tl.load(cu_seqlens + number, mask=number < segments, other=0)
        begun = (boundary // BLOCK_M + number <= tile) & (number < segments)
        segment += tl.sum(begun.to(tl.int32), axis=0)
    return segment


# What a compiler would make of one segment, or of a number of them that is a multiple of 16, gains nothing.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["segments"], do_not_specialize_on_alignment=["cu_seqlens"]
)
def _attend_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0915 - one kernel is one function
    query,
    key,
    value,
    out,
    cu_seqlens,
    segments,
    scale,
    query_stride,
    key_stride,
    value_stride,
    out_stride,
    QUERY_HEAD: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOUNDARIES: tl.constexpr,
):
    """One tile of BLOCK_M queries of one head, in LOW and HIGH columns; `scale` includes log2(e)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    segment = _segment_of(tile, cu_seqlens, segments, BLOCK_M, BOUNDARIES)
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    row = (tile - start // BLOCK_M - segment) * BLOCK_M
    if row >= length:
        return

    m = row + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    low = tl.arange(0, LOW)
    is_row = (m < length)[:, None]
    is_low = (low < HEAD_DIM)[None, :]
    q_rows = query + (start + m).to(tl.int64)[:, None] * query_stride + head * QUERY_HEAD
    k_rows = key + (start + n).to(tl.int64)[:, None] * key_stride + head * KEY_HEAD
    v_rows = value + (start + n).to(tl.int64)[:, None] * value_stride + head * VALUE_HEAD
    q_low = tl.load(q_rows + low[None, :], mask=is_row & is_low, other=0.0)
    sum_low = tl.zeros((BLOCK_M, LOW), tl.float32)
    if HIGH > 0:
        high = LOW + tl.arange(0, HIGH)
        is_high = (high < HEAD_DIM)[None, :]
        q_high = tl.load(q_rows + high[None, :], mask=is_row & is_high, other=0.0)
        sum_high = tl.zeros((BLOCK_M, HIGH), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)

    for column in range(0, length, BLOCK_N):
        is_key = column + n < length
        k_low = tl.load(k_rows + low[None, :], mask=is_key[:, None] & is_low, other=0.0)
        v_low = tl.load(v_rows + low[None, :], mask=is_key[:, None] & is_low, other=0.0)
        logits = tl.dot(q_low, tl.trans(k_low))
        if HIGH > 0:
            k_high = tl.load(k_rows + high[None, :], mask=is_key[:, None] & is_high, other=0.0)
            v_high = tl.load(v_rows + high[None, :], mask=is_key[:, None] & is_high, other=0.0)
            logits = tl.dot(q_high, tl.trans(k_high), logits)
        logits = tl.where(is_key[None, :], logits * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        shrinkage = tl.exp2(largest - new_largest)
        weights = tl.exp2(logits - new_largest[:, None])
        total = total * shrinkage + tl.sum(weights, 1)
        weights = weights.to(value.dtype.element_ty)
        sum_low = tl.dot(weights, v_low, sum_low * shrinkage[:, None])
        if HIGH > 0:
            sum_high = tl.dot(weights, v_high, sum_high * shrinkage[:, None])
        largest = new_largest
        k_rows += BLOCK_N * key_stride
        v_rows += BLOCK_N * value_stride

    o_rows = out + (start + m).to(tl.int64)[:, None] * out_stride + head * OUT_HEAD
    result_low = (sum_low / total[:, None]).to(out.dtype.element_ty)
    tl.store(o_rows + low[None, :], result_low, mask=is_row & is_low)
    if HIGH > 0:
        result_high = (sum_high / total[:, None]).to(out.dtype.element_ty)
        tl.store(o_rows + high[None, :], result_high, mask=is_row & is_high)


def attend(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, scale: float, out_THD: Tensor
) -> None:
    """Writes the attention of every segment to `out_THD`; rows outside every segment stay as they are."""
    tokens, heads, head_dim = query_THD.shape
    segments = cu_seqlens.shape[0] - 1
    query_row, query_head, _ = query_THD.stride()
    key_row, key_head, _ = key_THD.stride()
    value_row, value_head, _ = value_THD.stride()
    out_row, out_head, _ = out_THD.stride()
    boundaries = next((number for number in _BOUNDARIES if segments <= number), _BOUNDARIES[-1])
    numbers = (
        *(query_row, key_row, value_row, out_row),
        *(query_head, key_head, value_head, out_head),
        *(head_dim, *split_head(head_dim), TILE_M, TILE_N, boundaries),
    )
    grid = (tokens // TILE_M + segments, heads, 1)
    args = (query_THD, key_THD, value_THD, out_THD, cu_seqlens, segments, scale * _LOG2_E, *numbers)
    if isinstance(_attend_tile, triton.JITFunction):
        _launcher.launch(grid, args, numbers)
    else:  # in Triton's interpreter
        _attend_tile[grid](*args, num_warps=_WARPS, num_stages=_STAGES)


class _Launcher:
    """Launches versions of the kernel, past Triton's search for one, which takes longer than a launch."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def launch(self, grid: tuple[int, int, int], args: tuple[Any, ...], numbers: tuple[int, ...]) -> None:
        """Triton tells versions apart by dtype and alignment of the first four `args`, and by `numbers`."""
        query, key, value, out = args[:4]
        device = driver.active.get_current_device()
        version = (
            *(device, numbers),
            *(query.dtype, key.dtype, value.dtype, out.dtype),
            *(query.data_ptr() % _ALIGNMENT, key.data_ptr() % _ALIGNMENT),
            *(value.data_ptr() % _ALIGNMENT, out.data_ptr() % _ALIGNMENT),
        )
        compiled = self.compiled.get(version)
        if compiled is None:
            self.compiled[version] = _attend_tile[grid](*args, num_warps=_WARPS, num_stages=_STAGES)
        else:
            compiled[grid](*args, stream=driver.active.get_current_stream(device))


_launcher = _Launcher()


def compiled_kernels() -> list[Any]:
    """Returns the versions of the kernel that were launched, each once."""
    return list(dict.fromkeys(_launcher.compiled.values()))


@functools.cache
def split_head(head_dim: int) -> tuple[int, int]:
    """Two powers of two, at least 16, that cover a head with few columns to spare; the second may be 0.

    >>> split_head(64), split_head(72), split_head(128)
    ((64, 0), (64, 16), (128, 0))
    """
    whole = max(16, triton.next_power_of_2(head_dim))
    if head_dim in (whole, 8):
        return whole, 0
    low = max(16, whole // 2)
    high = max(16, triton.next_power_of_2(head_dim - low))
    return (low, high) if low + high < whole else (whole, 0)
