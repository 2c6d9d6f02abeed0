"""Convolutions, pooling and interpolation: batched, and with the tokens where the batch is not."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten


def _image(b: Builder, rank: int) -> fx.Node:
    """(batch, channels, height, width) of as many spatial dimensions; sometimes without a batch."""
    if b.chance(0.1):
        return b.floats(rank=rank)
    shape = [0, 2, *[4] * (rank - 2)]
    if b.chance(0.15):
        shape = shape[1:]
    return b.rows(shape, 0 if b.chance(0.75) else b.random.randrange(len(shape)))


@call_of("convolution", "conv1d", "conv2d", "conv3d")
def _convolution(b: Builder, name: str) -> fx.Node | None:
    spatial = b.choice((1, 2)) if name == "convolution" else int(name[4])
    x = _image(b, spatial + 2)
    channels = x.meta["val"].shape[-spatial - 1] if x.meta["val"].dim() > spatial else 2
    groups = channels if isinstance(channels, int) and b.chance(0.2) else 1
    inner = channels // groups if isinstance(channels, int) else 1
    outer = groups * b.choice((1, 2))
    transposed = name == "convolution" and b.chance(0.3)
    shape = [groups * inner, outer // groups] if transposed else [outer, inner]
    weight = b.shared([*shape, *[b.choice((1, 2, 3))] * spatial])
    bias = b.shared([outer]) if b.flag() else None
    stride, padding = [b.choice((1, 1, 2))] * spatial, [b.choice((0, 1))] * spatial
    if name == "convolution":
        arguments: tuple[Any, ...] = (stride, padding, [1] * spatial, transposed, [0] * spatial, groups)
        return b.call(aten.convolution.default, x, weight, bias, *arguments)
    packet = getattr(aten, name)
    if b.chance(0.2):
        return b.call(packet.padding, x, weight, bias, [1] * spatial, "same", [1] * spatial, groups)
    return b.call(packet.default, x, weight, bias, stride, padding, [1] * spatial, groups)


@call_of("im2col")
def _im2col(b: Builder, name: str) -> fx.Node | None:
    return b.call(aten.im2col.default, _image(b, 4), [2, 2], [1, 1], [b.choice((0, 1))] * 2, [2, 2])


@call_of("native_group_norm")
def _group_norm(b: Builder, name: str) -> fx.Node | None:
    x = _image(b, b.choice((3, 4)))
    sizes = b.sizes(x)
    batch, channels, rest = sizes[0], sizes[1], 1
    for size in sizes[2:]:
        rest = b.number(operator.mul, rest, size)
    if b.chance(0.25):  # other sizes of the same product
        batch, channels, rest = b.choice(
            (
                (1, batch, b.number(operator.mul, channels, rest)),
                (b.number(operator.floordiv, batch, 2), b.number(operator.mul, channels, 2), rest),
                (b.number(operator.mul, batch, channels), 1, rest),
                (channels, batch, rest),
            )
        )
    groups = b.choice((1, 1, 2))
    known = isinstance(channels, int)
    weights = [b.shared([channels]) if known and b.flag() else None for _ in range(2)]
    return b.call(aten.native_group_norm.default, x, *weights, batch, channels, rest, groups, 1e-5)


@call_of("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d")
def _pool(b: Builder, name: str) -> fx.Node | None:
    x = _image(b, 4)
    target = getattr(aten, name).default
    if name.startswith("_adaptive"):
        return b.call(target, x, b.choice(([1, 1], [2, 2], [3, 1])))
    return b.call(target, x, [2, 2], b.choice(([], [1, 1], [2, 2])), b.choice(([0, 0], [1, 1])))


@call_of("upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d")
@call_of("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa")
def _upsample(b: Builder, name: str) -> fx.Node | None:
    x = _image(b, 4)
    packet = getattr(aten, name)
    corners = [] if "nearest" in name else [b.flag()]
    if b.chance(0.3):
        return b.call(packet.vec, x, *b.choice((([3, 5], *corners, None), (None, *corners, [2.0, 1.5]))))
    size = [b.count() if b.chance(0.1) else b.choice((1, 3, 6)), b.choice((1, 3, 6))]
    return b.call(packet.default, x, size, *corners)
