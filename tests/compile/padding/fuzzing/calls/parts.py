"""Cutting and joining."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten
_END = 2**63 - 1


@call_of("slice")
def _slice(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    dim = b.dim(x, 0.5)
    n = b.size(x, dim)
    half = b.number(operator.floordiv, n, 2)
    start = b.choice((None, 0, 0, 1, -1, half, b.limit()) if b.chance(0.5) else (None, 0))
    ends = (None, _END, n, half, 3, -1, b.limit(), b.count())
    step = b.choice((1, 1, 1, 2, 3)) if b.chance(0.3) else 1
    return b.call(aten.slice.Tensor, x, dim, start, b.choice(ends if b.chance(0.6) else (None, _END)), step)


@call_of("select")
def _select(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    return b.call(aten.select.int, x, b.dim(x), b.choice((0, 0, -1, 1, b.count() if b.chance(0.1) else 0)))


@call_of("split", "split_with_sizes", "chunk", "unbind")
def _split(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    dim = b.dim(x, 0.85)
    if name in ("split", "unbind") and dim % x.meta["val"].dim() in b.token_dims(x):
        return b.call(aten.split.Tensor, x, 5000, dim)  # as many parts as tokens are too many
    if name == "split":
        if b.chance(0.3):
            return b.call(aten.split.sizes, x, _partition(b, x, dim), dim)
        return b.call(aten.split.Tensor, x, b.choice((1, 2, 5)), dim)
    if name == "chunk":
        return b.call(aten.chunk.default, x, b.choice((1, 2, 3)), dim)
    if name == "unbind":
        return b.call(aten.unbind.int, x, dim)
    return b.call(aten.split_with_sizes.default, x, _partition(b, x, dim), dim)


def _partition(b: Builder, x: fx.Node, dim: int) -> list[Any]:
    first = b.choice((1, 1, 2))
    return [first, b.number(operator.sub, b.size(x, dim), first)]


@call_of("cat", "stack")
def _join(b: Builder, name: str) -> fx.Node | None:
    x = b.pick(lambda v: v.dim() > 0) if b.chance(0.3) else None
    x = x or b.floats()
    others = [_partner(b, x) for _ in range(b.choice((1, 1, 2)))]
    tensors = [x, *others] if b.chance(0.7) else [*others, x]
    return b.call(getattr(aten, name).default, tensors, b.dim(x, 0.8, extra=int(name == "stack")))


def _partner(b: Builder, x: fx.Node) -> fx.Node:
    """A tensor of the same rank, or a class token for every row."""
    value = x.meta["val"]
    found = b.pick(lambda v: v.dim() == value.dim() and v.dtype == value.dtype)
    if b.chance(0.25) and value.dim() > 1:
        token = b.shared(
            [1] * (value.dim() - 1) + [value.shape[-1] if isinstance(value.shape[-1], int) else 1]
        )
        sizes = b.sizes(x)
        if b.chance(0.5):
            sizes[b.random.randrange(len(sizes))] = 1
        expanded = b.call(aten.expand.default, token, sizes)
        if expanded is not None:
            return expanded
    if b.chance(0.3):
        changed = b.call(aten.tanh.default if value.is_floating_point() else aten.abs.default, x)
        if changed is not None:
            return changed
    return found if found is not None and b.chance(0.5) else x


@call_of("constant_pad_nd")
def _pad(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    pairs = b.random.randint(1, x.meta["val"].dim())
    amounts = [b.choice((0, 0, 1, 2, -1)) for _ in range(2 * pairs)]
    for dim in b.token_dims(x):
        index = 2 * (x.meta["val"].dim() - 1 - dim)
        if b.chance(0.7) and index < len(amounts):
            amounts[index : index + 2] = [0, 0]
    if b.chance(0.05):
        amounts[0] = b.count()
    return b.call(aten.constant_pad_nd.default, x, amounts, b.scalar())
