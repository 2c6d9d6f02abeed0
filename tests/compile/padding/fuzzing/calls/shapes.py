"""Copies, views, cutting and joining, and tensors made from sizes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten
_END = 2**63 - 1
_VIEWED = {torch.float64: (torch.float32, torch.int64, torch.int32), torch.float32: (torch.float64,)}


_DTYPES = (torch.float32, torch.float64, torch.float64, torch.int64, torch.bool, torch.float16)


@call_of("alias", "clone", "contiguous", "detach", "lift_fresh_copy")
@call_of("zeros_like", "ones_like", "empty_like", "full_like", "_to_copy", "to")
def _same(b: Builder, name: str) -> fx.Node | None:
    x = b.pick(lambda v: v.dim() > 0) if b.chance(0.4) else None
    x = x or b.floats()
    packet = getattr(aten, name)
    if name == "to":
        return b.call(packet.dtype, x, b.choice(_DTYPES))
    if name == "_to_copy":
        return b.call(packet.default, x, dtype=b.choice(_DTYPES))
    arguments = [b.scalar()] if name == "full_like" else []
    return b.call(packet.default, x, *arguments)


@call_of("view_as_real", "view_as_complex")
def _complex(b: Builder, name: str) -> fx.Node | None:
    pairs = b.pick(lambda v: v.is_floating_point() and v.dim() > 0 and v.shape[-1] == 2)
    if pairs is None or b.flag():
        shape, dim = b.choice((([0, 2], 0), ([0, 3, 2], 0), ([3, 0, 2], 1)))
        pairs = b.rows(shape, dim)
    numbers = b.call(aten.view_as_complex.default, pairs)
    if name == "view_as_complex" or numbers is None:
        return numbers
    return b.call(aten.view_as_real.default, numbers)


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
def _cut(b: Builder, name: str) -> fx.Node | None:
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


@call_of("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
def _filled(b: Builder, name: str) -> fx.Node | None:
    sizes = _sizes(b)
    like = [b.floats()] if name.startswith("new_") else []
    dtype = {} if like else {"dtype": b.choice((torch.float64, torch.int64, None))}
    fill = [b.scalar()] if "full" in name else []
    overload = "memory_format" if name == "empty" else "default"
    return b.call(getattr(getattr(aten, name), overload), *like, sizes, *fill, **dtype)


def _sizes(b: Builder) -> list[Any]:
    sizes: list[Any] = [b.choice((1, 2, 3)) for _ in range(b.choice((0, 1, 2)))]
    if b.chance(0.75):
        sizes.insert(b.random.randrange(len(sizes) + 1), b.count())
    return sizes


@call_of("arange")
def _arange(b: Builder, name: str) -> fx.Node | None:
    end = b.count() if b.chance(0.8) else b.choice((3, 5))
    kind = b.random.random()
    if kind < 0.5:
        return b.call(aten.arange.default, end, dtype=b.choice((None, torch.float64)))
    start = b.choice((0, 0, 0, 1, b.count()))
    if kind < 0.7:
        return b.call(aten.arange.start, start, end)
    step = b.choice((1, 2, 3, 0.5, -1, b.count()))
    return b.call(aten.arange.start_step, start, end, step)


@call_of("scalar_tensor")
def _scalar_tensor(b: Builder, name: str) -> fx.Node | None:
    return b.call(aten.scalar_tensor.default, b.scalar(), dtype=torch.float64)
