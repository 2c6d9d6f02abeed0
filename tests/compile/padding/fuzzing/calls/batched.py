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


@call_of("convolution")
def _convolution(b: Builder, name: str) -> fx.Node | None:
    return convolution(b, name, b.choice((1, 2, 2, 3)))


def convolution(b: Builder, name: str, spatial: int) -> fx.Node | None:
    """A convolution over as many dimensions, transposed or by groups, its input batched or not."""
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


@call_of("im2col", "col2im")
def _blocks(b: Builder, name: str) -> fx.Node | None:
    arguments = ([2, 2], [1, 1], [b.choice((0, 1))] * 2, [2, 2])
    if name == "im2col":
        return b.call(aten.im2col.default, _image(b, 4), *arguments)
    shape, dim = b.choice((([0, 8, 4], 0), ([0, 8, 4], 0), ([2, 0, 4], 1), ([0, 4], 0), ([8, 4], 0)))
    x = b.rows(shape, dim) if 0 in shape else b.shared(shape)
    size = [4, 4] if arguments[2] == [0, 0] else [2, 2]
    return b.call(aten.col2im.default, x, size, *arguments)


@call_of("_native_batch_norm_legit_no_training")
def _batch_norm(b: Builder, name: str) -> fx.Node | None:
    x = _image(b, b.choice((2, 3, 4)))
    channels = x.meta["val"].shape[1] if x.meta["val"].dim() > 1 else 2
    width = channels if isinstance(channels, int) else 1
    mean, variance = b.shared([width]), b.call(aten.exp.default, b.shared([width]))
    weights = [b.shared([width]) if b.flag() else None for _ in range(2)]
    return b.call(getattr(aten, name).default, x, *weights, mean, variance, 0.1, 1e-5)


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


def _spatial(name: str) -> int:
    """How many dimensions an operation works on, which its name says."""
    return next(int(name[at - 1]) for at in range(len(name), 0, -1) if name[at - 1].isdigit())


@call_of("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
@call_of("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _pool(b: Builder, name: str) -> fx.Node | None:
    spatial = _spatial(name)
    x = _image(b, spatial + 2)
    target = getattr(aten, name).default
    if "adaptive" in name:
        return b.call(target, x, b.choice(([1] * spatial, [2] * spatial, [3, *[1] * (spatial - 1)])))
    stride, padding = b.choice(([], [1] * spatial, [2] * spatial)), [b.choice((0, 1))] * spatial
    return b.call(target, x, [2] * spatial, stride, padding)


@call_of("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
@call_of("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
@call_of("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
@call_of("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa")
def _upsample(b: Builder, name: str) -> fx.Node | None:
    spatial = _spatial(name)
    x = _image(b, spatial + 2)
    packet = getattr(aten, name)
    corners = [] if "nearest" in name else [b.flag()]
    sizes: list[Any] = [b.choice((1, 3, 6)) for _ in range(spatial)]
    if b.chance(0.3):
        scales = [b.choice((2.0, 1.5)) for _ in range(spatial)]
        return b.call(packet.vec, x, *b.choice(((sizes, *corners, None), (None, *corners, scales))))
    if b.chance(0.1):
        sizes[0] = b.count()
    return b.call(packet.default, x, sizes, *corners)


@call_of("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@call_of("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _pad(b: Builder, name: str) -> fx.Node | None:
    spatial = _spatial(name)
    amounts: list[Any] = [b.choice((0, 1, 1, 2)) for _ in range(2 * spatial)]
    if b.chance(0.03):
        amounts[0] = b.count()
    return b.call(getattr(aten, name).default, _image(b, spatial + 2), amounts)


@call_of("pixel_shuffle", "pixel_unshuffle")
def _shuffle(b: Builder, name: str) -> fx.Node | None:
    x = _image(b, 4)
    if b.chance(0.7):
        shape, dim = b.choice((([0, 4, 2, 2], 0), ([0, 8, 2, 4], 0), ([3, 0, 4, 2, 2], 1), ([0, 2, 2], 0)))
        x = b.rows(shape, dim)
    return b.call(getattr(aten, name).default, x, b.choice((1, 2, 2)))
