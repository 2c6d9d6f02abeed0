"""Tensors made from sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten


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
