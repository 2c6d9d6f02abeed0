"""Matrix products: rows and shared matrices in every place."""

from __future__ import annotations

import torch
from torch import fx

from fxsplit_encoder.compile.passes import fp8_linear, gelu_epilogue  # noqa: F401  (register their ops)

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten


def _matrix(b: Builder, rows: int | None, columns: int) -> fx.Node:
    """(rows, columns), shared or not; None: a row a token."""
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


@call_of("fxsplit::quantise_rows", "fxsplit::linear_fp8")
def _fp8(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(rank=2 if name.endswith("linear_fp8") else None)
    quantised = b.call(torch.ops.fxsplit.quantise_rows.default, x)
    if name.endswith("quantise_rows") or quantised is None:
        return quantised
    rows, scales = b.values[-2:]
    inner = _inner(b, x) or 4
    weight = b.call(torch.ops.fxsplit.quantise_rows.default, b.shared([3, inner]))
    if weight is None:
        return None
    matrix, factors = b.values[-2:]
    bias = b.shared([3], torch.float32) if b.flag() else None
    arguments = (rows, scales, matrix, factors, bias, torch.float32)
    return b.call(torch.ops.fxsplit.linear_fp8.default, *arguments)
