"""Operations that repeat what they are given."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State
from fxsplit_encoder.compile.sizes import shape_exprs


@rule("expand")
def _expand(view: NodeView) -> State:
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    return Rows(view.rows() + view.output().dim() - view.rank())


@rule("repeat")
def _repeat(view: NodeView) -> State:
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    counts = view.arg(1)
    dim = view.rows() + len(counts) - view.rank()
    if counts[dim] != 1:
        raise view.fail("repeats the token dimension")
    return Rows(dim)


def _copies(view: NodeView) -> State:
    """What the tokens do not change, once a token (a class token) or once in all: more copies begin with
    fewer.
    """
    varying = [dim for dim, size in enumerate(shape_exprs(view.output())) if view.analysis.varies(size)]
    return Rows(varying[0]) if varying else SHARED
