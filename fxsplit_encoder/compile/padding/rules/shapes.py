"""Views and reorderings of dimensions, which keep every entry."""

from __future__ import annotations

import sympy

from fxsplit_encoder.compile.padding.rules.registry import RESHAPES, rule
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State
from fxsplit_encoder.compile.sizes import shape_exprs


@rule(*RESHAPES)
def _reshape(view: NodeView) -> State:
    """view(x, sizes): entries keep their order in memory, the last dimension running fastest. Where as many
    entries lie before the rows' dimension as before a dimension of the result that counts rows too, each
    block of them begins with what the real rows hold, which is as much of the one dimension as of the other.
    """
    dim, sizes = view.rows(), view.analysis.sizes
    before, after = shape_exprs(view.tensor()), shape_exprs(view.output())
    leading = sympy.Mul(*before[:dim])
    for candidate in range(len(after)):
        if sizes.varies(after[candidate]) and sizes.are_equal(sympy.Mul(*after[:candidate]), leading):
            return Rows(candidate)
    raise view.fail(f"from {tuple(before)} to {tuple(after)} joins tokens with an outer dimension")


@rule("permute")
def _permute(view: NodeView) -> State:
    """permute(x, dims): dimension i of the result is dimension dims[i] of x."""
    order = [view.dim(d) for d in view.arg(1)]
    return Rows(order.index(view.rows()))


@rule("transpose", "t")
def _transpose(view: NodeView) -> State:
    """transpose(x, a, b), t: two dimensions change places."""
    first, second = (0, 1) if view.name == "t" else (view.dim(view.arg(1)), view.dim(view.arg(2)))
    dim = view.rows()
    return Rows({first: second, second: first}.get(dim, dim)) if view.rank() > 1 else Rows(dim)


@rule("unsqueeze")
def _unsqueeze(view: NodeView) -> State:
    """unsqueeze(x, at): a dimension of size 1 more, before or behind that of the rows."""
    at = int(view.arg(1)) % (view.rank() + 1)
    dim = view.rows()
    return Rows(dim + 1 if at <= dim else dim)


@rule("squeeze")
def _squeeze(view: NodeView) -> State:
    """squeeze(x, dims): dimensions of size 1 less. One whose size is a symbol stays in the trace, and would
    go in a run where it happens to be 1.
    """
    dims = view.arg(1)
    listed = range(view.rank()) if dims is None else [dims] if isinstance(dims, int) else dims
    at = {view.dim(d) for d in listed}
    sizes = shape_exprs(view.tensor())
    if any(not sizes[d].is_Integer for d in at):
        raise view.unknown("drops dimensions whose sizes are not fixed")
    dim = view.rows()
    return Rows(dim - sum(1 for d in at if sizes[d] == 1 and d < dim))


@rule("flip")
def _flip(view: NodeView) -> State:
    """flip(x, dims): entries in reverse along dims, which are in the same row if the rows' is not one."""
    if view.rows() in {view.dim(d) for d in view.arg(1)}:
        raise view.fail("reverses the tokens")
    return Rows(view.rows())


@rule("roll")
def _roll(view: NodeView) -> State:
    """roll(x, shifts, dims): entries move along dims, within their row if the rows' is not one. Without dims
    the tensor is rolled as if it had one dimension.
    """
    dims = view.arg(2)
    listed = [dims] if isinstance(dims, int) else dims
    if not listed or view.rows() in {view.dim(d) for d in listed}:
        raise view.fail("moves the tokens")
    return Rows(view.rows())
