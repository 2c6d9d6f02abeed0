"""Fuse a linear layer and the GELU after it into `fxsplit::addmm_gelu`: decomposition tables take
torch's `aten._addmm_activation` apart, and on a CPU it applies the erf form.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxsplit_encoder._torch.dispatch import addmm_activation, define_op
from fxsplit_encoder.compile.passes.layers import layer_before
from fxsplit_encoder.compile.rewriting import at_every_node, replace_by_call

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


@at_every_node
def gelu_epilogue(node: fx.Node) -> bool:
    """Fuses a tanh GELU into the linear layer with a bias whose result only the GELU reads.

    Exact: cuBLAS's epilogue is the tanh form too, and is applied before the result is rounded to 16 bits. On
    a CPU the operation is the two that it replaces.
    """
    is_tanh = node.target is aten.gelu.default and node.kwargs.get("approximate") == "tanh"
    layer = layer_before(node.args[0]) if is_tanh else None
    if layer is None or layer.bias is None:
        return False
    replace_by_call(layer.node, addmm_gelu, *layer.node.args)
    reshaped: Any = node.args[0]
    node.replace_all_uses_with(reshaped)
    node.graph.erase_node(node)
    return True
