"""Linear layers become `fxsplit::linear`, whose kernel is measured, with the GELU or the sum that follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.passes.gelu_epilogue import addmm_gelu
from fxsplit_encoder.compile.passes.layers import linear_of
from fxsplit_encoder.compile.rewriting import call_function, is_parameter
from fxsplit_encoder.compile.sizes import shape_exprs
from fxsplit_encoder.products import linear

aten = torch.ops.aten


def measured_products(module: fx.GraphModule) -> int:
    """Linear layers, each with the tanh GELU or the residual addition after it, run by the kernel that was
    measured to be the fastest for their number of rows.

    Exact: every kernel computes activation(rows @ weight.T + bias) + residual, sums in float32 or as torch
    does, and is refused where its error is more than a tenth above that of torch's own product. A sum that is
    an epilogue rounds once instead of twice. Masks of pad rows come after the sum and stay there. A sum of
    more than two dimensions stays apart.
    """
    changed = 0
    for node in list(module.graph.nodes):
        call = _call_of(node)
        if call is None:
            continue
        rows, weight, bias, activation = call
        addition = _addition(node) if activation == "none" else None
        last, residual = (node, None) if addition is None else addition
        with module.graph.inserting_before(last):
            fused = call_function(module.graph, linear, rows, weight, bias, residual, activation)
        last.replace_all_uses_with(fused)
        module.graph.erase_node(last)
        if last is not node:
            module.graph.erase_node(node)
        changed += 1
    return changed


def _call_of(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, str] | None:
    """The rows, weight, bias and activation of a linear layer; None if a node is none."""
    found = linear_of(node)
    if found is not None:
        return found.rows, found.weight, found.bias, "none"
    if node.target is not addmm_gelu:
        return None
    bias, rows, matrix = node.args
    if (
        not isinstance(matrix, fx.Node)
        or matrix.target is not aten.t.default
        or not is_parameter(matrix.args[0])
    ):
        return None
    return rows, matrix.args[0], bias, "gelu_tanh"  # type: ignore[return-value]


def _addition(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The sum that alone reads a layer, with another tensor of the same form, and that tensor."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if user.target is not aten.add.Tensor or user.kwargs:
        return None
    residual: Any = next((argument for argument in user.args if argument is not node), None)
    if not isinstance(residual, fx.Node):
        return None
    values = (node.meta["val"], residual.meta["val"], user.meta["val"])
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    forms = {(value.dtype, tuple(shape_exprs(value))) for value in values}
    return (user, residual) if len(forms) == 1 else None
