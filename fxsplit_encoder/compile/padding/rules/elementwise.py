"""Operations that work entry by entry: an entry comes from those of the arguments in the same place."""

from __future__ import annotations

import torch

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State
from fxsplit_encoder.compile.sizes import expression


def pointwise(view: NodeView) -> State:
    """All arguments with rows have them along one dimension, and none is broadcast along it.

    This is the rule of operations that torch tags as pointwise, so they are not registered by name.
    """
    output = view.output()
    dims = set()
    for node in view.node.all_input_nodes:
        state, value = view.analysis.states.get(node, SHARED), node.meta.get("val")
        if isinstance(state, Rows) and isinstance(value, torch.Tensor):
            dim = state.dim + output.dim() - value.dim()
            if not view.analysis.are_equal(expression(value.shape[state.dim]), expression(output.shape[dim])):
                raise view.fail("broadcasts along the token dimension")
            dims.add(dim)
    if len(dims) != 1:
        raise view.fail(f"combines tensors whose token dimensions differ: {sorted(dims)}")
    return Rows(dims.pop())


@rule("alias", "clone", "contiguous", "detach", "_to_copy", "to", "lift_fresh_copy")
@rule("zeros_like", "ones_like", "empty_like", "full_like", "view_as_real", "view_as_complex")
def _same(view: NodeView) -> State:
    return Rows(view.rows())
