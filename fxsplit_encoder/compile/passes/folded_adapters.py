"""Low-rank adapters of linear layers become part of the layers' weights: LoRA, as PEFT computes it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.passes.layers import Linear, are_same_rows, is_reshape, layer_before
from fxsplit_encoder.compile.rewriting import at_every_node, call_function, derived_parameter
from fxsplit_encoder.compile.sizes import shape_exprs

aten = torch.ops.aten


@at_every_node
def folded_adapters(node: fx.Node) -> bool:
    """Makes a linear layer, to whose output `scale * (rows @ down.T @ up.T)` is added, one layer.

    Exact: the sums are those of the weight `weight + scale * up @ down`, which is computed in float32 and
    rounded once; in 16 bits a layer's results are rounded twice less, which makes up for it. Left alone, the
    small products are two more kernels a layer (times: docs/features.md).
    """
    found = _adapter(node) if node.target is aten.add.Tensor else None
    if found is not None:
        _fold(node.graph, node, *found)
    return found is not None


def with_adapter(weight: Tensor, down: Tensor, up: Tensor, *, scale: float) -> Tensor:
    """Returns a weight, (out_features, in_features), plus the product of (out_features, rank) and (rank,
    in_features) parts.
    """
    product = torch.mm(up.float(), down.float()).mul_(scale)
    return product.add_(weight).to(weight.dtype)


def with_bias(bias: Tensor, added: Tensor, *, scale: float) -> Tensor:
    """Returns a bias, (out_features,), plus that of an adapter."""
    return (bias.float() + scale * added.float()).to(bias.dtype)


def _fold(graph: fx.Graph, node: fx.Node, base: Linear, down: Linear, up: Linear, scale: float) -> None:
    fold = functools.partial(with_adapter, scale=scale)
    weight = derived_parameter(graph, fold, base.weight, down.weight, up.weight)
    bias = base.bias
    if bias is not None and up.bias is not None:
        bias = derived_parameter(graph, functools.partial(with_bias, scale=scale), bias, up.bias)
    base.replace_parameters(weight, bias)
    result: Any = node.args[0]
    source = result.args[0] if result.target is aten._to_copy.default else result
    dtype, own = node.meta["val"].dtype, source.meta["val"].dtype
    if dtype != own:  # an adapter in float32 beside a layer in 16 bits, to which PEFT converts the sum
        for user in [*node.users]:
            if user.target is aten._to_copy.default and user.kwargs == {"dtype": own}:
                user.replace_all_uses_with(source)
    if dtype != result.meta["val"].dtype:
        with graph.inserting_before(node):
            result = call_function(graph, aten._to_copy.default, source, dtype=dtype)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _adapter(node: fx.Node) -> tuple[Linear, Linear, Linear, float] | None:
    """Returns the layer, the two layers of its adapter and their scale that a sum adds; None: another sum."""
    result, scaled = node.args
    base = layer_before(result, _passes_on)
    if not isinstance(scaled, fx.Node) or scaled.target is not aten.mul.Tensor or len(scaled.users) > 1:
        return None
    product, scale = scaled.args
    up = layer_before(product, _passes_on)
    down = None if up is None else layer_before(up.rows, _passes_on)
    if base is None or up is None or down is None or not isinstance(scale, float | int) or node.kwargs:
        return None
    has_no_place = down.bias is not None or (up.bias is not None and base.bias is None)
    return None if has_no_place or not _fit(node, base, down, up) else (base, down, up, scale)


def _fit(node: fx.Node, base: Linear, down: Linear, up: Linear) -> bool:
    """Whether a row that is added is the adapter's of the same row, feature by feature."""
    summed = {shape_exprs(each.meta["val"]) for each in (node, *node.all_input_nodes)}
    widths = (down.in_features, down.out_features, up.out_features)
    expected = (base.in_features, up.in_features, base.out_features)
    return len(summed) == 1 and widths == expected and are_same_rows(down.rows, base.rows, _passes_on)


def _passes_on(node: fx.Node) -> bool:
    return is_reshape(node) or node.target in (aten._to_copy.default, aten.clone.default)
