"""Replace, for `invariant: true`, linear layers and attention by ops with independent rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.passes.dense_attention import plain_attention_of, replace_by_dense_attention
from fxsplit_encoder.compile.passes.gelu_epilogue import addmm_gelu
from fxsplit_encoder.compile.rewriting import at_every_node, is_parameter, replace_by_call
from fxsplit_encoder.kernels.products.fixed import GELU_TANH, NOTHING, fixed_linear

aten = torch.ops.aten

_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default)


@at_every_node
def fixed_products(node: fx.Node) -> bool:
    """Replaces every product of rows with parameters, and every attention over a batch without a mask.

    Exact: they are the same, by kernels that add in one order whatever the rows.
    """
    attention, product = plain_attention_of(node), _product_of(node)
    if attention is not None:
        replace_by_dense_attention(attention)
    elif product is not None:
        replace_by_call(node, fixed_linear, *product)
    return attention is not None or product is not None


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
