"""Low-rank adapters of linear layers become part of the layers' weights: LoRA, as PEFT computes it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.passes.layers import Linear, is_reshape, linear_of
from fxsplit_encoder.compile.rewriting import call_function, derived_parameter
from fxsplit_encoder.compile.sizes import shape_exprs

aten = torch.ops.aten


def folded_adapters(module: fx.GraphModule) -> int:
    """Makes a linear layer, to whose output `scale * (rows @ down.T @ up.T)` is added, one layer.

    Exact: the sums are those of the weight `weight + scale * up @ down`, which is computed in float32 and
    rounded once; in 16 bits a layer's results are rounded twice less, which makes up for it. Left alone, the
    small products of Qwen3-VL-8B's blocks are 216 more kernels (docs/features.md).
    """
    nodes = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    return sum(_fold(module.graph, node) for node in nodes)  # in order: an adapter may be added to others


def with_adapter(weight: Tensor, down: Tensor, up: Tensor, *, scale: float) -> Tensor:
    """Returns a weight, (out_features, in_features), plus the product of (out_features, rank) and (rank,
    in_features) parts.
    """
    product = torch.mm(up.float(), down.float()).mul_(scale)
    return product.add_(weight).to(weight.dtype)


def with_bias(bias: Tensor, added: Tensor, *, scale: float) -> Tensor:
    """Returns a bias, (out_features,), plus that of an adapter."""
    return (bias.float() + scale * added.float()).to(bias.dtype)


def _fold(graph: fx.Graph, node: fx.Node) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    base, scaled = _layer_of(node.args[0], node), node.args[1]
    if base is None or not isinstance(scaled, fx.Node) or scaled.target is not aten.mul.Tensor:
        return False
    if len(scaled.users) > 1:
        return False
    product, scale = scaled.args
    up = _layer_of(product, scaled)
    down = None if up is None else _layer_of(up.rows, up.node)
    if up is None or down is None or down.bias is not None or not isinstance(scale, float | int):
        return False
    if (up.bias is not None and base.bias is None) or not _are_same(down.rows, base.rows):
        return False
    fold = functools.partial(with_adapter, scale=scale)
    weight = derived_parameter(graph, fold, base.weight, down.weight, up.weight)
    bias = base.bias
    if bias is not None and up.bias is not None:
        bias = derived_parameter(graph, functools.partial(with_bias, scale=scale), bias, up.bias)
    base.replace_parameters(weight, bias)
    result: Any = node.args[0]
    dtype, own = node.meta["val"].dtype, result.meta["val"].dtype
    if dtype != own:  # an adapter in float32 beside a layer in 16 bits, to which PEFT converts the sum
        for user in [*node.users]:
            if user.target is aten._to_copy.default and user.kwargs == {"dtype": own}:
                user.replace_all_uses_with(result)
        with graph.inserting_before(node):
            result = call_function(graph, aten._to_copy.default, result, dtype=dtype)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    graph.eliminate_dead_code()
    return True


def _layer_of(result: Any, reader: fx.Node) -> Linear | None:
    """Returns the linear layer before a value that `reader` alone reads, through reshapes and conversions."""
    while isinstance(result, fx.Node) and [*result.users] == [reader]:
        if (layer := linear_of(result)) is not None:
            return layer
        if not _passes_on(result):
            return None
        result, reader = result.args[0], result
    return None


def _passes_on(node: fx.Node) -> bool:
    return is_reshape(node) or node.target in (aten._to_copy.default, aten.clone.default)


def _are_same(rows: fx.Node, others: fx.Node) -> bool:
    """Whether two layers read the same rows, perhaps in other dtypes."""
    if shape_exprs(rows.meta["val"]) != shape_exprs(others.meta["val"]):
        return False
    sources: list[Any] = [rows, others]
    for number, source in enumerate(sources):
        while _passes_on(source):
            source = source.args[0]
        sources[number] = source
    return sources[0] is sources[1]
