"""Tensors made from sizes alone."""

from __future__ import annotations

from torch import fx

from fxsplit_encoder.compile.padding.rules.registry import CONSTRUCTORS, rule
from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State


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
