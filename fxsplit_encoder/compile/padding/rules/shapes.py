"""Views, permutations of dimensions, parts and joined parts of tensors, and tensors made from sizes alone."""

from __future__ import annotations

import sympy
from torch import fx

from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State, rule
from fxsplit_encoder.compile.sizes import shape_exprs

RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")

_FILLED = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
CONSTRUCTORS = frozenset(("arange", "scalar_tensor", *_FILLED))

_VIEWS = ("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "slice", "select")
_PARTS = ("split", "split_with_sizes", "unbind", "getitem", "cat", "stack", "clone", "_to_copy")
MOVERS = frozenset((*RESHAPES, *_VIEWS, *_PARTS))
"""These only move values about or repeat them."""


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
    permutation = [view.dim(d) for d in view.arg(1)]
    return view.rows_of().at(permutation.index(view.rows_of().dim))


@rule("transpose", "t")
def _transpose(view: NodeView) -> State:
    """transpose(x, a, b), t: two dimensions change places."""
    first, second = (0, 1) if view.name == "t" else (view.dim(view.arg(1)), view.dim(view.arg(2)))
    rows = view.rows_of()
    return rows.at({first: second, second: first}.get(rows.dim, rows.dim)) if view.rank() > 1 else rows


@rule("unsqueeze")
def _unsqueeze(view: NodeView) -> State:
    """unsqueeze(x, at): a dimension of size 1 more, before or after that of the rows."""
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
        raise view.fail("drops dimensions whose sizes are not fixed")
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


@rule(*CONSTRUCTORS)
def _constructor(view: NodeView) -> State:
    """arange, zeros, full...: an entry is a constant, or for arange start + step times its place; so a longer
    tensor begins with the shorter one, unless start, step or the constant were made from the count.
    """
    dim = view.varying_dim()
    fill = {"full": 1, "new_full": 2, "scalar_tensor": 0}.get(view.name)
    if fill is not None and isinstance(view.arg(fill), fx.Node):
        raise view.fail("fills with a computed value")
    if view.name == "arange":
        start, step = (0, 1) if len(view.node.args) == 1 else (view.arg(0), view.arg(2, 1))
        if dim is None and view.analysis.reads_token_count(view.node):
            raise view.fail("makes values from the token count")
        if dim is not None and (isinstance(start, fx.Node) or start != 0):
            raise view.fail("counts from a start that is not 0")
        if dim is not None and isinstance(step, fx.Node):
            raise view.fail("counts in computed steps")
    return SHARED if dim is None else Rows(dim)
