"""Operations that mix rows and have no rule: whatever else is in a graph, they are refused along tokens."""

from __future__ import annotations

import torch
from torch import fx

from ..builder import Builder
from .lookups import indices
from .reductions import convolution
from .registry import call_without_rule

aten = torch.ops.aten


@call_without_rule("along a dimension")
def _along(b: Builder) -> fx.Node | None:
    x = b.floats()
    dim = b.dim(x, 0.5)
    return b.choice(
        (
            lambda: b.call(aten.sort.default, x, dim),
            lambda: b.call(aten.topk.default, x, 1, dim),
            lambda: b.call(aten.max.dim, x, dim, b.flag()),
            lambda: b.call(aten.median.dim, x, dim),
            lambda: b.call(aten.logsumexp.default, x, [dim]),
            lambda: b.call(aten.cummax.default, x, dim),
            lambda: b.call(aten.renorm.default, x, 2, dim, 1.0),
        )
    )()


@call_without_rule("whole")
def _whole(b: Builder) -> fx.Node | None:
    x = b.floats()
    targets = (aten.max.default, aten.min.default, aten.median.default)
    return b.call(b.choice(targets), x)


@call_without_rule("random numbers")
def _random(b: Builder) -> fx.Node | None:
    x = b.floats()
    return b.choice(
        (
            lambda: b.call(aten.rand_like.default, x),
            lambda: b.call(aten.bernoulli.p, x, 0.5),
            lambda: b.call(aten.native_dropout.default, x, 0.5, True),
            lambda: b.call(aten.rand.default, [3]),
            lambda: b.call(aten.rrelu.default, x, 0.1, 0.3, True),
        )
    )()


@call_without_rule("moved rows")
def _moved(b: Builder) -> fx.Node | None:
    x, ids = b.floats(rank=2), indices(b)
    wide = b.call(aten.unsqueeze.default, ids, 1) or ids
    return b.choice(
        (
            lambda: b.call(aten.gather.default, x, 0, wide),
            lambda: b.call(aten.take.default, x, ids),
            lambda: b.call(aten.index_add.default, x, 0, ids, x),
            lambda: b.call(aten.scatter.src, x, 0, wide, x),
            lambda: b.call(aten.index_put.default, x, [ids], b.shared([])),
            lambda: b.call(aten.diagonal.default, x),
        )
    )()


@call_without_rule("convolutions")
def _convolutions(b: Builder) -> fx.Node | None:
    spatial = b.choice((1, 2, 3))
    return convolution(b, f"conv{spatial}d", spatial)


@call_without_rule("cumulative lengths")
def _lengths(b: Builder) -> fx.Node | None:
    lengths = b.segments()
    return b.choice(
        (
            lambda: b.call(aten.sub.Tensor, lengths, 1),
            lambda: b.call(aten._to_copy.default, lengths, dtype=torch.float64),
            lambda: b.call(aten.amax.default, lengths, [0], True),
            lambda: b.call(aten.slice.Tensor, lengths, 0, 1, 2**63 - 1),
            lambda: b.call(aten.zeros_like.default, lengths),
            lambda: b.call(aten.zeros.default, [b.size(lengths, 0), 2]),
            lambda: b.call(aten.arange.default, b.size(lengths, 0)),
        )
    )()
