"""Replace torch's attention and products by our ops: with more kernels, or with independent rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.passes.activations import addmm_gelu
from fxsplit_encoder.compile.passes.layers import Attention, attention_of
from fxsplit_encoder.compile.rewriting import at_every_node, call_function, is_parameter, replace_by_call
from fxsplit_encoder.compile.sizes import shape_exprs
from fxsplit_encoder.kernels.attention import dense_attention as attend
from fxsplit_encoder.kernels.products.fixed import GELU_TANH, NOTHING, fixed_linear

aten = torch.ops.aten

_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default)


@at_every_node
def dense_attention(node: fx.Node) -> bool:
    """Replaces 16-bit attention over equally long sequences, without a mask, by an op with measured kernels.

    Exact: it is the same attention, and no kernel is chosen that is less accurate than torch's own (see
    `attention.chooser`). It stays where inputs are not stored as by a linear layer: most would need copies.
    """
    attention = plain_attention_of(node)
    if attention is None or not _is_fast(attention):
        return False
    replace_by_dense_attention(attention)
    return True


def plain_attention_of(node: fx.Node) -> Attention | None:
    """Returns the attention without a mask, between equally long sequences, that a node is."""
    found = attention_of(node)
    if found is None or found.bias is not None:
        return None
    shapes = {shape_exprs(each.meta["val"]) for each in (found.query, found.key, found.value)}
    return found if len(shapes) == 1 else None


def _is_fast(attention: Attention) -> bool:
    inputs = (attention.query, attention.key, attention.value)
    values = [*(each.meta["val"] for each in inputs), attention.node.meta["val"][0]]
    return values[0].dtype in (torch.bfloat16, torch.float16) and all(map(_is_packed, values))


def _is_packed(value_BHTD: Tensor) -> bool:
    """Whether tokens of all sequences are rows of one matrix at one stride, of fixed sizes."""
    tokens, strides = value_BHTD.shape[2], value_BHTD.stride()
    if not all(isinstance(number, int) for number in (*value_BHTD.shape[1:], *strides)):
        return False
    return strides[3] == 1 and strides[0] == tokens * strides[2]


def replace_by_dense_attention(found: Attention) -> None:
    """Puts `fxsplit::dense_attention` in the place of attention that `plain_attention_of` returns."""
    graph = found.node.graph
    with graph.inserting_before(found.node):
        attended = call_function(graph, attend, found.query, found.key, found.value, found.scale)
    found.replace_by(attended)


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
