"""Cutting tensors apart and joining them, along any dimension but that of the tokens."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State


@rule("slice")
def _slice(view: NodeView) -> State:
    """slice(x, dim, start, end, step): the same entries of every row; or all rows."""
    dim, rows = view.dim(view.arg(1, 0)), view.rows_of()
    start, end, step = view.arg(2, 0), view.arg(3), view.arg(4, 1)
    is_whole = start == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= 2**62))
    if dim == rows.dim and not is_whole:
        raise view.fail("cuts the token dimension")
    return rows


@rule("select")
def _select(view: NodeView) -> State:
    """select(x, dim, index): the same entry of every row."""
    dim, rows = view.dim(view.arg(1)), view.rows_of()
    if dim == rows.dim:
        raise view.fail("takes one token")
    return rows.at(rows.dim - 1) if dim < rows.dim else rows


@rule("split", "split_with_sizes", "chunk")
def _split(view: NodeView) -> State:
    """split(x, sizes, dim): parts of every row."""
    dim, rows = view.dim(view.arg(2, 0)), view.rows_of()
    if dim == rows.dim:
        raise view.fail("cuts the token dimension")
    return view.each_result(rows)


@rule("unbind")
def _unbind(view: NodeView) -> State:
    """unbind(x, dim): every entry of each row as a tensor of its own."""
    dim, rows = view.dim(view.arg(1, 0)), view.rows_of()
    if dim == rows.dim:
        raise view.fail("takes tokens apart")
    return view.each_result(rows.at(rows.dim - 1) if dim < rows.dim else rows)


@rule("cat", "stack")
def _cat(view: NodeView) -> State:
    """cat(tensors, dim), stack: a row of the result is made of the rows with its number, where the tensors
    are not joined along the rows themselves. A tensor without rows could have as many only by chance, which
    the trace would have made a fixed size.
    """
    tensors = view.arg(0)
    states = [view.state(t) for t in tensors]
    all_rows = {s for s in states if isinstance(s, Rows)}
    if len(all_rows) != 1:
        raise view.fail("joins tensors whose token dimensions differ")
    rows = all_rows.pop()
    dim = int(view.arg(1, 0)) % view.output().dim()
    if view.name == "stack":
        return rows.at(rows.dim + 1) if dim <= rows.dim else rows
    if dim == rows.dim:
        raise view.fail("appends along the token dimension")
    return rows


@rule("constant_pad_nd")
def _pad(view: NodeView) -> State:
    """constant_pad_nd(x, amounts), a pair for each dimension from the last: constants around every row."""
    rows, padding = view.rows(), list(view.arg(1))
    index = 2 * (view.rank() - 1 - rows)
    if index < len(padding) and (padding[index], padding[index + 1]) != (0, 0):
        raise view.fail("pads the token dimension")
    return Rows(rows)
