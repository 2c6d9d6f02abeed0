"""Views and copies of other shapes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten
_VIEWED = {torch.float64: (torch.float32, torch.int64, torch.int32), torch.float32: (torch.float64,)}


@call_of("view", "_unsafe_view", "reshape")
def _reshape(b: Builder, name: str) -> fx.Node | None:
    x = b.pick(lambda v: v.dim() > 0) if b.chance(0.2) else None
    x = x or b.floats()
    packet = getattr(aten, name)
    if name == "view" and b.chance(0.1):
        return b.call(packet.dtype, x, b.choice(_VIEWED.get(x.meta["val"].dtype, (torch.int8,))))
    for _ in range(3):
        sizes = other_sizes(b, x)
        if (node := b.call(packet.default, x, sizes)) is not None:
            return node
    return None


def other_sizes(b: Builder, x: fx.Node) -> list[Any]:
    """Sizes that hold as many entries, some of them left to torch, and some wrong."""
    sizes = b.sizes(x)
    for _ in range(b.choice((1, 1, 2, 3))):
        sizes = b.choice((_merged, _split, _with_one, _regrouped, _flat, _shuffled))(b, sizes)
    if b.chance(0.3) and -1 not in sizes:
        sizes[b.random.randrange(len(sizes))] = -1
    return sizes


def _merged(b: Builder, sizes: list[Any]) -> list[Any]:
    if len(sizes) < 2 or -1 in sizes:
        return sizes
    at = b.random.randrange(len(sizes) - 1)
    product = b.number(operator.mul, sizes[at], sizes[at + 1])
    return [*sizes[:at], product, *sizes[at + 2 :]]


def _split(b: Builder, sizes: list[Any]) -> list[Any]:
    if len(sizes) > 5 or -1 in sizes:
        return sizes
    at, k = b.random.randrange(len(sizes)), b.choice((2, 2, 3, 4))
    if isinstance(sizes[at], int) and sizes[at] % k:
        return sizes
    outer = b.number(operator.floordiv, sizes[at], k)
    return [*sizes[:at], *b.choice(([outer, k], [k, outer])), *sizes[at + 1 :]]


def _with_one(b: Builder, sizes: list[Any]) -> list[Any]:
    at = b.random.randrange(len(sizes) + 1)
    return [*sizes[:at], 1, *sizes[at:]]


def _regrouped(b: Builder, sizes: list[Any]) -> list[Any]:
    """(n // k, ..., k * w) of (n, ..., w), and the other way about."""
    if len(sizes) < 2 or -1 in sizes:
        return sizes
    one, other = b.random.sample(range(len(sizes)), 2)
    k = b.choice((2, 4))
    sizes = list(sizes)
    sizes[one] = b.number(operator.floordiv, sizes[one], k)
    sizes[other] = b.number(operator.mul, sizes[other], k)
    return sizes


def _flat(b: Builder, sizes: list[Any]) -> list[Any]:
    return [-1, b.choice((1, 2, 3, 4, 8))] if b.chance(0.7) else [b.choice((1, 2, 4)), -1]


def _shuffled(b: Builder, sizes: list[Any]) -> list[Any]:
    """The same sizes at other places, where a size stands for a dimension that it is not."""
    return b.random.sample(sizes, len(sizes)) if b.chance(0.4) else sizes


@call_of("flatten", "unflatten")
def _flatten(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    rank = x.meta["val"].dim()
    if name == "flatten":
        first = b.random.randrange(rank)
        last = b.random.randrange(first, rank)
        return b.call(aten.flatten.using_ints, x, first, last if b.flag() else last - rank)
    dim = b.dim(x, 0.5)
    parts = b.choice(([-1, 2], [2, -1], [-1, 4], [1, -1], [-1, 1]))
    if b.chance(0.3):
        parts = [b.number(operator.floordiv, b.size(x, dim), 2), 2]
    return b.call(aten.unflatten.int, x, dim, parts)


@call_of("permute", "transpose", "t")
def _reorder(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(rank=2) if name == "t" and b.chance(0.8) else b.floats()
    rank = x.meta["val"].dim()
    if name == "t":
        return b.call(aten.t.default, x)
    if name == "transpose":
        return b.call(aten.transpose.int, x, b.dim(x, 0.3), b.dim(x, 0.3))
    order = b.random.sample(range(rank), rank)
    return b.call(aten.permute.default, x, [d - rank if b.chance(0.3) else d for d in order])


@call_of("unsqueeze", "squeeze")
def _ones(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    if name == "unsqueeze":
        return b.call(aten.unsqueeze.default, x, b.dim(x, 0.5, extra=1))
    if b.chance(0.5):
        x = b.call(aten.unsqueeze.default, x, b.dim(x, 0.5, extra=1)) or x
    calls = [(aten.squeeze.default,), (aten.squeeze.dim, b.dim(x, 0.6)), (aten.squeeze.dims, b.dims(x))]
    target, *arguments = b.choice(calls)
    return b.call(target, x, *arguments)


@call_of("flip")
def _flip(b: Builder, name: str) -> fx.Node | None:
    x = b.floats()
    return b.call(aten.flip.default, x, b.dims(x))


@call_of("expand")
def _expand(b: Builder, name: str) -> fx.Node | None:
    if b.chance(0.5):
        x = b.shared(b.choice(([], [1], [3], [1, 3], [2, 1, 3], [1, 1, 1])))
    else:
        x = b.floats()
        if b.chance(0.5):
            x = b.call(aten.unsqueeze.default, x, b.dim(x, 0.5, extra=1)) or x
    sizes = [_grown(b, x, dim) for dim in range(x.meta["val"].dim())]
    new = [b.count() if b.chance(0.4) else b.choice((1, 2, 3)) for _ in range(b.choice((0, 0, 1, 2)))]
    return b.call(aten.expand.default, x, [*new, *sizes])


def _grown(b: Builder, x: fx.Node, dim: int) -> Any:
    size = x.meta["val"].shape[dim]
    if isinstance(size, int) and size == 1:
        return b.count() if b.chance(0.4) else b.choice((1, 2, 3, -1))
    return b.choice((-1, b.size(x, dim)))


@call_of("repeat")
def _repeat(b: Builder, name: str) -> fx.Node | None:
    x = b.shared(b.choice(([], [1], [3], [2, 3], [1, 2]))) if b.chance(0.5) else b.floats()
    tokens = b.token_dims(x)
    counts: list[Any] = [
        1 if d in tokens and b.chance(0.8) else _times(b) for d in range(x.meta["val"].dim())
    ]
    new = [_times(b) for _ in range(b.choice((0, 0, 1)))]
    return b.call(aten.repeat.default, x, [*new, *counts])


def _times(b: Builder) -> Any:
    return b.count() if b.chance(0.25) else b.choice((1, 1, 1, 2, 3))


@call_of("unfold", "roll", "tril", "triu")
def _moved(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(at_least=2)
    if name == "unfold":
        return b.call(aten.unfold.default, x, b.dim(x), b.choice((1, 2)), b.choice((1, 2)))
    if name == "roll":
        dims = b.choice(([], b.dims(x), [b.dim(x)]))
        shifts = [b.count() if b.chance(0.05) else b.choice((1, -1, 2)) for _ in dims or [0]]
        return b.call(aten.roll.default, x, shifts, dims)
    if b.chance(0.5):
        x = b.rows([0, 3, 4], b.choice((0, 0, 1)))
    diagonal = b.count() if b.chance(0.05) else b.choice((0, 1, -1))
    return b.call(getattr(aten, name).default, x, diagonal)
