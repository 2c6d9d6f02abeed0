"""Fuse a linear layer and the GELU after it into `fxsplit::addmm_gelu`: decomposition tables take
torch's `aten._addmm_activation` apart, and on a CPU it applies the erf form.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxsplit_encoder._torch.dispatch import addmm_activation, define_op
from fxsplit_encoder.compile.passes.layers import Linear, is_reshape, linear_of
from fxsplit_encoder.compile.rewriting import call_function

aten = torch.ops.aten


def _reference(bias: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    return F.gelu(torch.addmm(bias, rows, matrix), approximate="tanh")


def _epilogue(bias: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    result: Tensor = addmm_activation(bias, rows, matrix, use_gelu=True)
    return result


addmm_gelu = define_op(
    "addmm_gelu(Tensor bias, Tensor rows, Tensor matrix) -> Tensor",
    {"CPU": _reference, "CUDA": _epilogue},
    lambda bias, rows, matrix: rows.new_empty(rows.shape[0], matrix.shape[1]),
)


def gelu_epilogue(module: fx.GraphModule) -> int:
    """Fuses a tanh GELU into the linear layer with a bias whose result only the GELU reads.

    Exact: cuBLAS's epilogue is the tanh form too, and is applied before the result is rounded to 16 bits. On
    a CPU the operation is the two that it replaces.
    """
    changed = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.gelu.default):
        linear = linear_before(node)
        if node.kwargs.get("approximate") != "tanh" or linear is None:
            continue
        bias, rows, matrix = linear.node.args
        with module.graph.inserting_before(linear.node):
            fused = call_function(module.graph, addmm_gelu, bias, rows, matrix)
        linear.node.replace_all_uses_with(fused)
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
        module.graph.erase_node(linear.node)
        changed += 1
    return changed


def linear_before(gelu: fx.Node) -> Linear | None:
    """Returns the layer with a bias whose result only this GELU reads, if there is one."""
    linear = linear_of(before_reshapes(gelu.args[0]))
    return None if linear is None or linear.bias is None else linear


def before_reshapes(node: Any) -> Any:
    """Returns what a node reads through reshapes; None if a value in between has other users."""
    while len(node.users) == 1:
        if not is_reshape(node):
            return node
        node = node.args[0]
    return None
