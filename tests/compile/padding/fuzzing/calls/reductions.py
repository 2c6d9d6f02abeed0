"""Entries that come from many: products with rows and shared matrices in every place, reductions and
normalizations along any dimensions, convolutions and pooling with the tokens as the batch and elsewhere.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.passes import gelu_epilogue  # noqa: F401  (registers its op)

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten


def _matrix(b: Builder, rows: int | None, columns: int) -> fx.Node:
    """(rows, columns), shared or not; None: a row per token."""
    return b.shared([rows, columns]) if rows is not None else b.rows([0, columns], 0)


def _inner(b: Builder, x: fx.Node, dim: int = -1) -> int | None:
    size = x.meta["val"].shape[dim]
    return size if isinstance(size, int) else None


@call_of("mm", "matmul", "linear")
def _product(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(rank=2 if name == "mm" else None)
    inner = _inner(b, x)
    other = b.pick(lambda v: v.is_floating_point() and v.dim() > 0)
    if b.chance(0.15) and other is not None:
        weight = other
    elif inner is None:
        weight = _matrix(b, None, 3)
    elif name == "matmul" and b.chance(0.3):
        weight = b.shared([b.choice((1, 2, 3)), inner, 2])
    else:
        weight = _matrix(b, inner, b.choice((1, 3, 4)))
    if name == "linear":
        weight = b.call(aten.t.default, weight) or weight
        features = weight.meta["val"].shape[0]
        bias = [b.shared([features])] if isinstance(features, int) and b.flag() else []
        return b.call(aten.linear.default, x, weight, *bias)
    swapped = b.chance(0.1)
    return b.call(getattr(aten, name).default, *((weight, x) if swapped else (x, weight)))


@call_of("addmm", "fxsplit::addmm_gelu")
def _addmm(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(rank=2)
    inner = _inner(b, x)
    weight = _matrix(b, inner, 3)
    bias = b.choice(([3], [1, 3], [1], [1, 1])) if b.chance(0.85) else None
    added = b.floats(rank=2) if bias is None else b.shared(bias)
    if name == "fxsplit::addmm_gelu":
        return b.call(torch.ops.fxsplit.addmm_gelu.default, added, x, weight)
    return b.call(aten.addmm.default, added, x, weight, **({"beta": 2} if b.chance(0.2) else {}))


@call_of("fxsplit::linear")
def _linear(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(rank=2)
    inner = _inner(b, x)
    weight = b.shared([3, inner]) if inner is not None else b.call(aten.t.default, _matrix(b, None, 3))
    if weight is None:
        return None
    bias = b.shared([3]) if b.chance(0.5) else None
    activation = b.choice(("none", "gelu_tanh"))
    return b.call(torch.ops.fxsplit.linear.default, x, weight, bias, activation)


@call_of("fxsplit::fixed_linear")
def _fixed_linear(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(rank=2)
    weight = _matrix(b, _inner(b, x), 3)
    bias = b.shared([3]) if b.flag() else None
    pair = (weight, x) if b.chance(0.1) else (x, weight)
    return b.call(torch.ops.fxsplit.fixed_linear.default, *pair, bias, "")


@call_of("bmm", "baddbmm")
def _batched(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(rank=3)
    shape = x.meta["val"].shape
    inner, batch = _inner(b, x), _inner(b, x, 0)
    if b.chance(0.3) and inner is not None and batch is not None:
        other: fx.Node | None = b.shared([batch, inner, 2])
    else:
        other = b.pick(lambda v: v.dim() == 3 and v.is_floating_point() and v.shape[0] == shape[0])
        if other is None or b.chance(0.6):
            other = b.call(aten.transpose.int, x, 1, 2)
    if other is None:
        return None
    pair = (other, x) if b.chance(0.3) else (x, other)
    if name == "bmm":
        return b.call(aten.bmm.default, *pair)
    added = b.shared(b.choice(([1, 1, 1], [1], [1, 1], []))) if b.chance(0.6) else b.floats(rank=3)
    return b.call(aten.baddbmm.default, added, *pair)


@call_of("sum", "mean", "any", "all", "var", "std", "var_mean")
def _several_dims(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    if name in ("any", "all") and b.chance(0.5):
        x = b.pick(lambda v: v.dtype == torch.bool) or x
    packet = getattr(aten, name)
    dims, keep = b.dims(x), b.flag()
    if name in ("sum", "mean"):
        overload = packet.dim_IntList if name == "sum" else packet.dim
        arguments = [(), (dims,), (dims, keep), (None,), (dims, True)]
    elif name in ("any", "all"):
        if b.chance(0.4):
            return b.call(packet.dim, x, b.dim(x), keep)
        overload, arguments = packet.dims, [(dims,), (dims, keep), (None, keep)]
    else:
        if b.chance(0.4):
            correction = b.choice((None, 0, 1))
            return b.call(
                packet.correction, x, b.choice((dims, dims, dims, None)), correction=correction, keepdim=keep
            )
        overload, arguments = packet.dim, [(dims,), (dims, b.flag()), (dims, b.flag(), keep)]
    if b.chance(0.15):
        unbiased = [b.flag()] if name.startswith(("var", "std")) and b.flag() else []
        return b.call(packet.default, x, *unbiased)
    return b.call(overload, x, *b.choice(arguments))


@call_of("amax", "amin")
def _extremes(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    arguments = [(), (b.dims(x),), (b.dims(x), b.flag()), ([b.dim(x)], True)]
    return b.call(getattr(aten, name).default, x, *b.choice(arguments[0 if b.chance(0.1) else 1 :]))


@call_of("argmax", "argmin")
def _places(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    arguments = [(), (None, b.flag()), (b.dim(x),), (b.dim(x), b.flag()), (b.dim(x), True)]
    return b.call(getattr(aten, name).default, x, *b.choice(arguments[0 if b.chance(0.2) else 2 :]))


@call_of("prod")
def _prod(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    return b.call(aten.prod.default, x) if b.chance(0.1) else b.call(aten.prod.dim_int, x, b.dim(x), b.flag())


@call_of("linalg_vector_norm")
def _norm(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    order = b.choice((2, 1, float("inf"), 0, 3))
    return b.call(
        aten.linalg_vector_norm.default, x, order, b.choice((b.dims(x), b.dims(x), b.dims(x), None)), b.flag()
    )


@call_of("_softmax", "_log_softmax", "_safe_softmax", "softmax", "cumsum", "cumprod", "logcumsumexp")
def _along(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    if name == "softmax":
        return b.call(aten.softmax.int, x, b.dim(x))
    extra = [False] if name in ("_softmax", "_log_softmax") else []
    safe = 0.5 if "cum" in name else 0.75
    return b.call(getattr(aten, name).default, x, b.dim(x, safe), *extra)


@call_of("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _normalize(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(at_least=2)
    value = x.meta["val"]
    ranks = [r for r in range(1, value.dim()) if not any(d >= value.dim() - r for d in b.token_dims(x))]
    rank = b.choice(ranks) if ranks and b.chance(0.9) else b.random.randint(1, value.dim())
    shape = b.sizes(x)[value.dim() - rank :]
    fixed = all(isinstance(s, int) for s in shape)
    weights = [b.shared(shape) if fixed and b.flag() else None for _ in range(2)]
    if name in ("layer_norm", "native_layer_norm"):
        return b.call(getattr(aten, name).default, x, shape, *weights, 1e-5)
    return b.call(getattr(aten, name).default, x, shape, weights[0], 1e-6)


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
    """Transposed or by groups, its input batched or not."""
    spatial = b.choice((1, 2, 2, 3))
    x = _image(b, spatial + 2)
    channels = x.meta["val"].shape[-spatial - 1] if x.meta["val"].dim() > spatial else 2
    groups = channels if isinstance(channels, int) and b.chance(0.2) else 1
    inner = channels // groups if isinstance(channels, int) else 1
    outer = groups * b.choice((1, 2))
    transposed = b.chance(0.3)
    shape = [groups * inner, outer // groups] if transposed else [outer, inner]
    weight = b.shared([*shape, *[b.choice((1, 2, 3))] * spatial])
    bias = b.shared([outer]) if b.flag() else None
    stride, padding = [b.choice((1, 1, 2))] * spatial, [b.choice((0, 1))] * spatial
    arguments = (stride, padding, [1] * spatial, transposed, [0] * spatial, groups)
    return b.call(aten.convolution.default, x, weight, bias, *arguments)


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
