"""Operations that work entry by entry, or repeat the entries that they are given."""

from __future__ import annotations

import torch
from torch import fx

from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State, rule
from fxsplit_encoder.compile.sizes import expression

COPIES = frozenset(("expand", "repeat"))
"""These make rows out of what has none."""


_DIVISIONS = frozenset(("div", "divide", "floor_divide", "remainder", "fmod"))


@rule("floor_divide")  # which torch does not tag
def pointwise(view: NodeView) -> State:
    """An entry of the result is computed from one entry of each argument: the one at the same place, or the
    one at 0 of a dimension that is broadcast. So with rows along one dimension in all arguments that have
    any, none of them broadcast, and the others shared, the result has rows there.

    This is the rule of operations that torch tags as pointwise, so they are not registered by name.
    """
    output = view.output()
    dims = set()
    for node in view.node.all_input_nodes:
        state, value = view.analysis.states.get(node, SHARED), node.meta.get("val")
        if isinstance(state, list):
            raise view.fail("takes several tensors as one argument")
        if isinstance(state, Rows) and isinstance(value, torch.Tensor):
            assert state.dim < value.dim(), node
            dim = state.dim + output.dim() - value.dim()
            if not view.analysis.sizes.are_equal(
                expression(value.shape[state.dim]), expression(output.shape[dim])
            ):
                raise view.fail("broadcasts along the token dimension")
            dims.add(state.at(dim))
    if len(dims) != 1:
        raise view.fail(f"combines tensors whose token dimensions differ: {sorted(d.dim for d in dims)}")
    _require_safe_division(view)
    return view.each_result(dims.pop())


def _require_safe_division(view: NodeView) -> None:
    """Integers may be divided by what is not 0 only, and pad rows of integers are zeros: a CPU raises."""
    divisor = view.arg(1)
    if view.name not in _DIVISIONS or not isinstance(divisor, fx.Node):
        return
    value = divisor.meta["val"]
    by_rows = isinstance(view.state(divisor), Rows) and isinstance(value, torch.Tensor)
    if by_rows and not view.output().is_floating_point():
        raise view.fail("divides integers by those of the tokens, which may be 0 in pad rows")


@rule("alias", "clone", "contiguous", "detach", "_to_copy", "to", "lift_fresh_copy")
@rule("zeros_like", "ones_like", "empty_like", "full_like", "view_as_real", "view_as_complex")
def _same(view: NodeView) -> State:
    """The same entries, in another dtype or memory, or constants of the same shape. Of a complex number's two
    parts the dimension is the last, after that of the rows.
    """
    rows = view.rows_of()
    if view.name == "view_as_complex" and rows.dim == view.rank() - 1:
        raise view.fail("takes tokens for the parts of complex numbers")
    return rows


@rule("tril", "triu")
def _triangle(view: NodeView) -> State:
    """tril(x, diagonal): an entry is kept or zeroed by its place in the last two dimensions, whose sizes
    padding does not change where the rows lie before them.
    """
    if view.rows() >= view.rank() - 2:
        raise view.fail("keeps entries by their place among the tokens")
    return Rows(view.rows())


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
