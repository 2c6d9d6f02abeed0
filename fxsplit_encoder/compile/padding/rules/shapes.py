"""Views and reorderings of dimensions, which keep every entry."""

from __future__ import annotations

import sympy

from fxsplit_encoder.compile.padding.rules.registry import RESHAPES, rule
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State
from fxsplit_encoder.compile.sizes import shape_exprs


@rule(*RESHAPES)
def _reshape(view: NodeView) -> State:
    """view(x, sizes): entries keep their order in memory, the last dimension running fastest. Rows along
    `dim` are, in memory, as many blocks as the dimensions before `dim` have entries, times those within it;
    each begins with what the real rows hold. The one dimension of the result that counts tokens falls into
    those of these blocks that the dimensions before it do not tell apart: none but one, or it was joined with
    them.
    """
    rows, sizes = view.rows_of(), view.analysis.sizes
    before, after = shape_exprs(view.tensor()), shape_exprs(view.output())
    all_blocks = sympy.Mul(*before[: rows.dim], rows.blocks)
    for dim, size in enumerate(after):
        if sizes.varies(size):
            blocks = sizes.quotient(all_blocks, sympy.Mul(*after[:dim]))
            if blocks is None or sizes.quotient(size, blocks) is None:
                break
            return Rows(dim, blocks)
    raise view.fail(f"from {tuple(before)} to {tuple(after)} joins tokens with an outer dimension")


@rule("permute")
def _permute(view: NodeView) -> State:
    """permute(x, dims): dimension i of the result is dimension dims[i] of x."""
    order = [view.dim(d) for d in view.arg(1)]
    return view.rows_of().at(order.index(view.rows_of().dim))


@rule("transpose", "t")
def _transpose(view: NodeView) -> State:
    """transpose(x, a, b), t: two dimensions change places."""
    first, second = (0, 1) if view.name == "t" else (view.dim(view.arg(1)), view.dim(view.arg(2)))
    rows = view.rows_of()
    return rows.at({first: second, second: first}.get(rows.dim, rows.dim)) if view.rank() > 1 else rows


@rule("unsqueeze")
def _unsqueeze(view: NodeView) -> State:
    """unsqueeze(x, at): a dimension of size 1 more, before or behind that of the rows."""
    at = int(view.arg(1)) % (view.rank() + 1)
    rows = view.rows_of()
    return rows.at(rows.dim + 1) if at <= rows.dim else rows


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
    rows = view.rows_of()
    return rows.at(rows.dim - sum(1 for d in at if sizes[d] == 1 and d < rows.dim))


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
