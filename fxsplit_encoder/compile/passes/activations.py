"""Linear layers and the activation after them become one op: cuBLAS's product with a GELU, or
`fxsplit::linear`, whose kernel is measured.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxsplit_encoder._torch.dispatch import addmm_activation, define_op
from fxsplit_encoder.compile.passes.layers import Linear, are_same_rows, layer_before
from fxsplit_encoder.compile.rewriting import at_every_node, derived_parameter, replace_by_call
from fxsplit_encoder.compile.sizes import shape_exprs
from fxsplit_encoder.kernels.products.measured import interleaved, linear

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
"""An op of ours, since decomposition tables take torch's `aten._addmm_activation` apart, and on a CPU it
applies the erf form."""


@at_every_node
def gelu_epilogue(node: fx.Node) -> bool:
    """Fuses a tanh GELU into the linear layer with a bias whose result only the GELU reads.

    Exact: cuBLAS's epilogue is the tanh form too, and is applied before the result is rounded to 16 bits. On
    a CPU the operation is the two that it replaces.
    """
    layer = _layer_of_gelu(node) if node.kwargs.get("approximate") == "tanh" else None
    if layer is not None:
        _fuse(layer, node, node, addmm_gelu, *layer.node.args)
    return layer is not None


def _layer_of_gelu(node: fx.Node) -> Linear | None:
    """Returns the layer with a bias whose result only this GELU reads; None: there is none."""
    layer = layer_before(node.args[0]) if node.target is aten.gelu.default else None
    return None if layer is None or layer.bias is None else layer


def _fuse(layer: Linear, activation: fx.Node, result: fx.Node, target: Any, *args: Any) -> None:
    """Makes a call of a layer, which gives what `activation` makes of its output, or `result` of that."""
    replace_by_call(layer.node, target, *args)
    reshaped: Any = activation.args[0]
    result.replace_all_uses_with(reshaped)


# On CUDA there is nothing to choose from for others, and Inductor adds their bias in the kernel after them.
_DTYPES = (torch.bfloat16, torch.float16)


@at_every_node
def measured_activations(node: fx.Node) -> bool:
    """Replaces linear layers with a GELU after them, of either form, and pairs of them whose results are
    silu(gate) * up, by an op whose kernel was measured to be the fastest for their number of rows.

    Exact: every kernel computes activation(rows @ weight.T + bias), sums in float32, and is refused where its
    error is more than a twentieth above that of torch's product and activation. The weights of a pair are
    kept as one, row by row in turn.
    """
    layer = _layer_of_gelu(node)
    if layer is not None and _has_choice(layer.node):
        activation = "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
        _fuse(layer, node, node, linear, layer.rows, layer.weight, layer.bias, activation)
        return True
    found = _gate_and_up(node) if node.target is aten.mul.Tensor else None
    if found is None:
        return False
    silu, gate, up = found
    weight, bias = derived_parameter(node.graph, interleaved, gate.weight, up.weight), None
    if gate.bias is not None and up.bias is not None:
        bias = derived_parameter(node.graph, interleaved, gate.bias, up.bias)
    _fuse(gate, silu, node, linear, gate.rows, weight, bias, "swiglu")
    return True


def _gate_and_up(node: fx.Node) -> tuple[fx.Node, Linear, Linear] | None:
    factors = [each for each in node.args if isinstance(each, fx.Node)]
    silus = [each for each in factors if each.target is aten.silu.default and len(each.users) == 1]
    if len(factors) != 2 or len(silus) != 1:
        return None
    (silu,) = silus
    other = factors[1 - factors.index(silu)]
    gate, up = map(layer_before, (silu.args[0], other))
    if gate is None or up is None or not _has_choice(gate.node):
        return None
    shapes = {shape_exprs(each.meta["val"]) for each in (node, silu, other)}
    sizes = {shape_exprs(each.weight.meta["val"]) for each in (gate, up)}
    fits = are_same_rows(gate.rows, up.rows) and (gate.bias is None) == (up.bias is None)
    return (silu, gate, up) if fits and len(shapes) == len(sizes) == 1 else None


def _has_choice(node: fx.Node) -> bool:
    value: Any = node.meta["val"]
    return value.dtype in _DTYPES or value.device.type != "cuda"
