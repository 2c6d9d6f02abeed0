"""Resizes an image, normalizes it and cuts it into patches in one Triton kernel. Imported only with Triton.

The arithmetic is Pillow's: weights are integers, and one axis is rounded to uint8 before the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WEIGHT_BITS = 22
"""Bits of a weight behind the point."""

# Entries of the axis that is resized second, and first, that a program makes.
_BLOCK_Y, _BLOCK_X = 16, 64
# Pixels of a row that are added up at once.
_BLOCK_TAPS = 8
_WARPS = 4

_SIZES = [
    *("in_height", "in_width", "row_stride", "column_stride", "channel_stride"),
    *("height", "width", "y_taps", "x_taps", "plane"),
]


# An image of another size is no reason to compile the kernel again.
@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _resize_tile(  # type: ignore[no-untyped-def]
    pixels,
    y_axis,
    x_axis,
    values,
    out,
    in_height,
    in_width,
    row_stride,
    column_stride,
    channel_stride,
    height,
    width,
    y_taps,
    x_taps,
    plane,
    FRAMES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One tile of one channel: each source row that it is made of is resized, then added to its rows."""
    x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    t = tl.arange(0, BLOCK_T)
    channel = tl.program_id(2)
    is_x = x < width
    is_y = y < height
    left = tl.load(x_axis + x, mask=is_x, other=0)
    top = tl.load(y_axis + y, mask=is_y, other=0)
    begin = tl.min(tl.where(is_y, top, in_height), axis=0)
    end = tl.minimum(tl.max(top, axis=0) + y_taps, in_height)
    half = 1 << (BITS - 1)
    total = tl.full((BLOCK_Y, BLOCK_X), half, tl.int32)
    for row in range(begin, end):
        line = tl.full((BLOCK_X,), half, tl.int32)
        row_pixels = pixels + row * row_stride + channel * channel_stride
        for first in range(0, x_taps, BLOCK_T):
            tap = first + t
            is_tap = (tap < x_taps)[:, None] & is_x[None, :]
            weight = tl.load(x_axis + (2 + tap)[:, None] * width + x[None, :], mask=is_tap, other=0)
            column = left[None, :] + tap[:, None]
            pixel = tl.load(row_pixels + column * column_stride, mask=is_tap & (column < in_width), other=0)
            line += tl.sum(weight * pixel.to(tl.int32), axis=0)
        line = tl.minimum(tl.maximum(line >> BITS, 0), 255)
        tap_y = row - top
        is_part = is_y & (tap_y >= 0) & (tap_y < y_taps)
        weight_y = tl.load(y_axis + (2 + tap_y) * height + y, mask=is_part, other=0)
        total += weight_y[:, None] * line[None, :]
    mask = is_y[:, None] & is_x[None, :]
    entry = channel * 256 + tl.minimum(tl.maximum(total >> BITS, 0), 255)
    value = tl.load(values + entry, mask=mask, other=0.0)
    y_place = tl.load(y_axis + height + y, mask=is_y, other=0)
    x_place = tl.load(x_axis + width + x, mask=is_x, other=0)
    place = out + y_place.to(tl.int64)[:, None] + x_place[None, :]
    for frame in tl.static_range(FRAMES):
        tl.store(place + (channel * FRAMES + frame) * plane, value, mask=mask)


def resize(pixels: Tensor, second: Tensor, first: Tensor, values: Tensor, out: Tensor) -> None:
    """Writes the patches of an image.

    Args:
        pixels: of uint8, (height, width, 3), or (width, height, 3), in any strides.
        second, first: of the axis that is resized second, the first one of `pixels`, and of the other: the
            first pixel of each entry of the result, its place in `out` (channel 0, frame 0), and the weights
            of the pixels from there on, (2 + taps, entries) of int32.
        values: (3 * 256,): what each value of each channel becomes.
        out: (patches, 3, frames, side, side); all frames are the same.
    """
    (y_rows, height), (x_rows, width) = second.shape, first.shape
    grid = (triton.cdiv(width, _BLOCK_X), triton.cdiv(height, _BLOCK_Y), 3)
    _resize_tile[grid](
        *(pixels, second, first, values, out, *pixels.shape[:2], *pixels.stride()),
        *(height, width, y_rows - 2, x_rows - 2, out.shape[3] * out.shape[4]),
        *(out.shape[2], WEIGHT_BITS, _BLOCK_Y, _BLOCK_X, _BLOCK_TAPS),
        num_warps=_WARPS,
    )
