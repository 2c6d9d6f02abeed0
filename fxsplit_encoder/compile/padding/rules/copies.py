"""Operations that repeat what they are given."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State


@rule("expand")
def _expand(view: NodeView) -> State:
    """expand(x, sizes): entry (..., i, ...) is that of x at the same place, or at 0 where x has one. Rows
    stay where they were, counted from the last dimension; of what is shared, more copies begin with fewer.
    """
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    rows = view.rows_of()
    return rows.at(rows.dim + view.output().dim() - view.rank())


@rule("repeat")
def _repeat(view: NodeView) -> State:
    """repeat(x, counts): entry i along a dimension of size c is that of x at i % c, so rows may be repeated
    along any dimension but their own; of what is shared, more copies begin with fewer.
    """
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    counts = view.arg(1)
    dim = view.rows() + len(counts) - view.rank()
    if counts[dim] != 1:
        raise view.fail("repeats the token dimension")
    return Rows(dim)


@rule("unfold")
def _unfold(view: NodeView) -> State:
    """unfold(x, dim, size, step): windows along `dim`, whose entries become the last dimension. Each row of
    another dimension is cut into windows of its own.
    """
    dim, rows = view.dim(view.arg(1)), view.rows()
    if dim == rows or view.rank() == 0:
        raise view.fail("cuts windows along the token dimension")
    return Rows(rows)


def _copies(view: NodeView) -> State:
    """What the tokens do not change, once a token (a class token) or once in all."""
    dim = view.varying_dim()
    return SHARED if dim is None else Rows(dim)
