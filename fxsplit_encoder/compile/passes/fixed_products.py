"""Replace, for `invariant: true`, linear layers and attention by ops with independent rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.passes.dense_attention import attends_plainly, replace_by_dense_attention
from fxsplit_encoder.compile.passes.gelu_epilogue import addmm_gelu
from fxsplit_encoder.compile.rewriting import call_function, is_parameter
from fxsplit_encoder.kernels.products.fixed import GELU_TANH, NOTHING, fixed_linear

aten = torch.ops.aten

_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default)


def fixed_products(module: fx.GraphModule) -> int:
    """Replaces every product of rows with parameters, and every attention over a batch without a mask.

    Exact: they are the same, by kernels that add in one order whatever the rows.
    """
    changed = 0
    for node in list(module.graph.nodes):
        if attends_plainly(node):
            replace_by_dense_attention(module.graph, node)
        elif (product := _product_of(node)) is not None:
            with module.graph.inserting_before(node):
                fixed = call_function(module.graph, fixed_linear, *product)
            node.replace_all_uses_with(fixed)
            module.graph.erase_node(node)
        else:
            continue
        changed += 1
    return changed


def _product_of(node: fx.Node) -> tuple[Any, Any, Any, str] | None:
    arguments: tuple[Any, ...] = tuple(node.args)
    if node.target is aten.mm.default:
        rows, matrix, bias, activation = *arguments, None, NOTHING
    elif node.target in (aten.addmm.default, addmm_gelu) and not node.kwargs and len(arguments) == 3:
        bias, rows, matrix = arguments
        activation = GELU_TANH if node.target is addmm_gelu else NOTHING
    else:
        return None
    is_vector = bias is None or (is_parameter(bias) and bias.meta["val"].dim() == 1)
    if not of_parameters(matrix) or not is_vector:
        return None
    return rows, matrix, bias, activation


def of_parameters(argument: Any) -> bool:
    """Whether an argument is a parameter, perhaps transposed."""
    if isinstance(argument, fx.Node) and argument.target in _TRANSPOSES:
        return of_parameters(argument.args[0])
    return is_parameter(argument)
