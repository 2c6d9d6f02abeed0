"""Matrix products: rows times shared matrices, or one product for each entry of a batch."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State


@rule("mm", "matmul", "linear")
def _linear(view: NodeView) -> State:
    """mm(x, w), linear(x, w, b): a row of the result is a row of x times a shared matrix. The sum runs over
    the last dimension of x, which must not be that of the rows.
    """
    view.require_shared(1, 2)
    if view.rows_of().dim == view.rank() - 1:
        raise view.fail("contracts the token dimension")
    if view.name == "matmul" and view.rank(1) > 2:
        raise view.unknown("multiplies with several matrices")
    return view.rows_of()


@rule("addmm", "fxsplit::addmm_gelu")
def _addmm(view: NodeView) -> State:
    """addmm(b, x, w): rows of x times a shared matrix, and a shared bias."""
    view.require_shared(0, 2)
    if view.rows_of(1).dim != 0:
        raise view.fail("contracts the token dimension")
    return view.rows_of(1)


@rule("fxsplit::linear_fp8")
def _linear_fp8(view: NodeView) -> State:
    """linear_fp8(rows, row_scales, weight, weight_scales, bias): rows with a scale each, shared weights."""
    view.require_shared(2, 3, 4)
    if view.rows(0) != 0 or view.rows(1) != 0:
        raise view.fail("contracts the token dimension")
    return Rows(0)


@rule("fxsplit::quantise_rows")
def _quantise_rows(view: NodeView) -> State:
    """quantise_rows(x): one scale for the last dimension, which is the largest entry there."""
    if view.rows() == view.rank() - 1:
        raise view.fail("scales tokens together")
    return view.each_result(Rows(view.rows()))


@rule("bmm")
def _batched_product(view: NodeView) -> State:
    """bmm(a, b): entry i of the result is a[i] @ b[i], so tokens may be the batch of both; or row j of every
    product comes from row j of a, so they may be the rows of a with b shared.
    """
    return _product(view, view.state(view.arg(0)), view.state(view.arg(1)))


@rule("baddbmm")
def _batched_product_and_sum(view: NodeView) -> State:
    """baddbmm(c, a, b): as bmm, with c shared or added along the same dimension."""
    product = _product(view, view.state(view.arg(1)), view.state(view.arg(2)))
    added = view.state(view.arg(0))
    if added is not SHARED and view.rows_of().at(view.rows_of().dim + 3 - view.rank()) != product:
        raise view.fail("adds a tensor whose rows are not those of the product")
    return product


def _product(view: NodeView, a: State, b: State) -> State:
    a_dim, b_dim = (state.dim if isinstance(state, Rows) else None for state in (a, b))
    if a_dim == 0 and (b is SHARED or b == a):
        return a
    if a is SHARED and b_dim == 0:
        return b
    if a_dim == 1 and b is SHARED:
        return a
    raise view.fail("multiplies along the token dimension")
