"""Operations whose result has the shape of their argument: copies, constants, complex views."""

from __future__ import annotations

import torch
from torch import fx

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten
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
