"""Merge the layers that make queries, keys and values of the same rows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import fake_mode_of
from fxsplit_encoder.compile.layouts import traced_downstream
from fxsplit_encoder.compile.passes.layers import TORCH_KERNELS, Linear, are_same_rows, linear_of, product
from fxsplit_encoder.compile.rewriting import arguments_of, at_every_node, call_function, derived_parameter
from fxsplit_encoder.kernels.attention import dense_attention, varlen_attention

aten = torch.ops.aten

_ATTENTION = (varlen_attention, dense_attention, *TORCH_KERNELS)

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)

# The search for layers before attention ends here.
_STARTS = frozenset((*_ATTENTION, *_PRODUCTS, aten.convolution.default))

# Attention kernels and copies read so many at once: each part begins at a multiple of them.
_ALIGNED_BYTES = 16


def joined(*parts: Tensor) -> Tensor:
    """Concatenates weights, (features, in_features) each, or biases, (features,)."""
    return torch.cat(parts)


def no_bias(weight: Tensor) -> Tensor:
    """Returns (features,) zeros for a weight of (features, in_features)."""
    return weight.new_zeros(weight.shape[0])


@at_every_node
def merged_projections(node: fx.Node) -> int:
    """Replaces linear layers of the same rows, each of which makes the query, the key or the value of one
    attention, by one layer.

    Exact: every feature stays the same sum; a layer without a bias gets zeros if others have one. Readers get
    a part of the common result, a view whose rows are further apart. Layers stay as they are where an
    operation cannot read that, or a part would not begin at a multiple of 16 bytes.
    """
    if node.target not in _ATTENTION:
        return 0
    given = arguments_of(node)
    found = {_only_layer(given[name]) for name in ("query", "key", "value")}
    in_order = [linear_of(each) for each in node.graph.nodes if each in found]
    layers = _of_same_rows(layer for layer in in_order if layer is not None)
    return sum(_merge(node.graph, each) for each in layers)


def _only_layer(result: fx.Node) -> fx.Node | None:
    """Returns the only layer before a value without another product or attention between; None: several."""
    found: set[fx.Node] = set()
    seen, waiting = {result}, [result]
    while waiting and len(found) <= 1:
        node = waiting.pop()
        if node.target in _STARTS:
            found.add(node)
            continue
        waiting += [read for read in node.all_input_nodes if read not in seen]
        seen.update(waiting)
    return found.pop() if len(found) == 1 else None


def _of_same_rows(layers: Iterable[Linear]) -> list[list[Linear]]:
    groups: list[list[Linear]] = []
    for layer in layers:
        group = next((each for each in groups if _fit(each[0], layer)), None)
        if group is None:
            groups.append(group := [])
        group.append(layer)
    return [group for group in groups if len(group) > 1]


def _fit(one: Linear, other: Linear) -> bool:
    parameters = [each for layer in (one, other) for each in (layer.weight, layer.bias) if each is not None]
    kinds = {(each.meta["val"].dtype, each.meta["val"].device) for each in parameters}
    return len(kinds) == 1 and are_same_rows(one.rows, other.rows)


def _merge(graph: fx.Graph, layers: list[Linear]) -> bool:
    """Puts one layer in the place of several; False if an operation cannot read the parts."""
    if not all(map(_can_be_part, layers)):
        return False
    ends = [*accumulate(layer.out_features for layer in layers)]
    downstream = traced_downstream(_traced_parts(layers, ends))
    if downstream is None:
        return False
    first = layers[0]
    weight = derived_parameter(graph, joined, *(layer.weight for layer in layers))
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = [layer.bias or derived_parameter(graph, no_bias, layer.weight) for layer in layers]
        bias = derived_parameter(graph, joined, *biases)
    with graph.inserting_before(first.node):
        merged = product(graph, first.rows, call_function(graph, aten.t.default, weight), bias)
        for layer, end in zip(layers, ends, strict=True):
            part = call_function(graph, aten.slice.Tensor, merged, 1, end - layer.out_features, end)
            layer.node.replace_all_uses_with(part)
    for node, value in downstream.items():
        node.meta["val"] = value
    return True


def _can_be_part(layer: Linear) -> bool:
    """Whether its features are whole multiples of an aligned read, and its bias has as many."""
    if layer.bias is not None and layer.bias.meta["val"].shape[0] != layer.out_features:
        return False
    return layer.out_features * int(layer.weight.meta["val"].itemsize) % _ALIGNED_BYTES == 0


def _traced_parts(layers: list[Linear], ends: list[int]) -> dict[fx.Node, Tensor]:
    value: Any = layers[0].node.meta["val"]
    with fake_mode_of([value]):
        merged = value.new_empty(value.shape[0], ends[-1])
        parts = (merged[:, end - layer.out_features : end] for layer, end in zip(layers, ends, strict=True))
        return dict(zip((layer.node for layer in layers), parts, strict=True))
