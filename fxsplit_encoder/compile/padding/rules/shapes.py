"""Views and reorderings of dimensions, which keep every entry."""

from __future__ import annotations

import sympy

from fxsplit_encoder.compile.padding.rules.registry import RESHAPES, rule
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State, symbols_of
from fxsplit_encoder.compile.sizes import shape_exprs


@rule(*RESHAPES)
def _reshape(view: NodeView) -> State:
    """Rows stay rows where as many entries lie before their dimension as before."""
    dim = view.rows()
    before, after = shape_exprs(view.tensor()), shape_exprs(view.output())
    leading = sympy.prod(before[:dim])
    for candidate in range(len(after)):
        tokens = view.analysis.symbol in symbols_of(after[candidate])
        if tokens and sympy.simplify(sympy.prod(after[:candidate]) - leading) == 0:
            return Rows(candidate)
    raise view.fail(f"from {tuple(before)} to {tuple(after)} joins tokens with an outer dimension")


@rule("permute")
def _permute(view: NodeView) -> State:
    order = [view.dim(d) for d in view.arg(1)]
    return Rows(order.index(view.rows()))


@rule("transpose", "t")
def _transpose(view: NodeView) -> State:
    first, second = (0, 1) if view.name == "t" else (view.dim(view.arg(1)), view.dim(view.arg(2)))
    dim = view.rows()
    return Rows({first: second, second: first}.get(dim, dim)) if view.rank() > 1 else Rows(dim)


@rule("unsqueeze")
def _unsqueeze(view: NodeView) -> State:
    at = int(view.arg(1)) % (view.rank() + 1)
    dim = view.rows()
    return Rows(dim + 1 if at <= dim else dim)


@rule("squeeze")
def _squeeze(view: NodeView) -> State:
    dims = view.arg(1)
    listed = range(view.rank()) if dims is None else [dims] if isinstance(dims, int) else dims
    sizes = shape_exprs(view.tensor())
    gone = {view.dim(d) for d in listed if sizes[view.dim(d)] == 1}
    dim = view.rows()
    return Rows(dim - sum(1 for d in gone if d < dim))


@rule("flip")
def _flip(view: NodeView) -> State:
    """flip: (input, dims)."""
    if view.rows() in {view.dim(d) for d in view.arg(1)}:
        raise view.fail("reverses the tokens")
    return Rows(view.rows())
