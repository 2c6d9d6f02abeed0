"""Matrix products: rows times shared matrices, or one product for each entry of a batch."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State


@rule("mm", "matmul", "linear")
def _linear(view: NodeView) -> State:
    """mm(x, w), linear(x, w, b): rows of x, shared weights; the contracted dimension is the last."""
    view.require_shared(1, 2)
    if view.rows() == view.rank() - 1:
        raise view.fail("contracts the token dimension")
    return Rows(view.rows())


@rule("addmm", "fxsplit::addmm_gelu")
def _addmm(view: NodeView) -> State:
    """addmm(b, x, w): rows of x, shared weights and bias."""
    view.require_shared(0, 2)
    if view.rows(1) != 0:
        raise view.fail("contracts the token dimension")
    return Rows(0)


@rule("fxsplit::linear_fp8")
def _linear_fp8(view: NodeView) -> State:
    """linear_fp8(rows, row_scales, weight, weight_scales, bias): rows with a scale each, shared weights."""
    view.require_shared(2, 3, 4)
    if view.rows(0) != 0 or view.rows(1) != 0:
        raise view.fail("contracts the token dimension")
    return Rows(0)


@rule("fxsplit::quantise_rows")
def _quantise_rows(view: NodeView) -> State:
    """One scale for the last dimension."""
    if view.rows() == view.rank() - 1:
        raise view.fail("scales tokens together")
    return view.each_result(Rows(view.rows()))


@rule("bmm", "baddbmm")
def _batched_matmul(view: NodeView) -> State:
    """bmm(a, b): tokens as the batch of both, or as the rows of a with b shared."""
    first = 1 if view.name == "baddbmm" else 0
    a, b = view.state(view.arg(first)), view.state(view.arg(first + 1))
    if view.name == "baddbmm" and view.state(view.arg(0)) not in (SHARED, Rows(0)):
        raise view.fail("adds a tensor whose rows are not its batch")
    if (a == Rows(0) and b in (Rows(0), SHARED)) or (a is SHARED and b == Rows(0)):
        return Rows(0)
    if a == Rows(1) and b is SHARED:
        return Rows(1)
    raise view.fail("multiplies along the token dimension")
