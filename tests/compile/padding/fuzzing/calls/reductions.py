"""Reductions, normalisations and scans: every overload, along any dimensions."""

from __future__ import annotations

import torch
from torch import fx

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten


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
def _product(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    return b.call(aten.prod.default, x) if b.chance(0.1) else b.call(aten.prod.dim_int, x, b.dim(x), b.flag())


@call_of("linalg_vector_norm")
def _norm(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    order = b.choice((2, 1, float("inf"), 0, 3))
    return b.call(
        aten.linalg_vector_norm.default, x, order, b.choice((b.dims(x), b.dims(x), b.dims(x), None)), b.flag()
    )


@call_of("_softmax", "_log_softmax", "softmax", "cumsum", "cumprod", "logcumsumexp")
def _along(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    if name == "softmax":
        return b.call(aten.softmax.int, x, b.dim(x))
    extra = [False] if name.startswith("_") else []
    safe = 0.5 if "cum" in name else 0.75
    return b.call(getattr(aten, name).default, x, b.dim(x, safe), *extra)


@call_of("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _normalise(b: Builder, name: str) -> fx.Node | None:
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
