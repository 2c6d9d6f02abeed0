"""Pads the hidden width of an MLP to a multiple of 128: GPUs multiply in such tiles."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import unset_fake_temporarily
from fxsplit_encoder.compile.padding.states import draws_random_numbers, is_pointwise
from fxsplit_encoder.compile.passes.layers import (
    Linear,
    is_reshape,
    keeps_features,
    layer_under,
    linear_of,
    views_of,
)
from fxsplit_encoder.compile.rewriting import at_every_node, call_function, derived_parameter, retrace
from fxsplit_encoder.compile.sizes import expression, shape_exprs

aten = torch.ops.aten

_TILE = 128

# More padding than this part of the width costs more than it gains.
_MOST_PADDING = 1 / 8


def padded_width(width: int, step: int) -> int:
    """Returns the next multiple of a step; the width itself where that does not pay."""
    padded = -(-width // step) * step
    return width if padded - width > width * _MOST_PADDING else padded


def pad_rows(weight: Tensor, rows: int, parts: int = 1) -> Tensor:
    """Appends rows of zeros to each of the equal parts of a weight or bias, up to `rows`."""
    each = weight.reshape(parts, -1, *weight.shape[1:])
    return F.pad(each, [0, 0] * (weight.dim() - 1) + [0, rows - each.shape[1]]).flatten(0, 1)


def pad_columns(weight: Tensor, columns: int, parts: int = 1) -> Tensor:
    """Appends zeros to each of the equal parts of every row, up to `columns`; returns two dimensions."""
    each = weight.reshape(weight.shape[0], parts, -1)
    return F.pad(each, [0, columns - each.shape[-1]]).flatten(1)


@at_every_node
def pad_mlp_width(node: fx.Node) -> bool:
    """Pads two linear layers with an elementwise function between them, gated or not, whose hidden width is
    no multiple of 128. A gate may be part of the layer that it gates, whose result is cut into equal parts.

    Exact: the first layers get rows of zeros, so their further columns are 0; the function f maps those to
    f(0), which has to be finite; the second layer gets columns of zeros, so its sums gain f(0) times 0.
    """
    down = linear_of(node)
    if down is None or (padded := padded_width(down.in_features, _TILE)) == down.in_features:
        return False
    hidden = _hidden(down)
    if hidden is None:
        return False
    starts, between = hidden
    with unset_fake_temporarily():
        is_finite = _is_finite_at_zero(starts, between, down.rows)
    if is_finite:
        _pad(down, starts, between, padded)
    return is_finite


@dataclass(frozen=True, slots=True)
class _Start:
    """The result of a first layer, or one of its equal parts."""

    layer: Linear
    part: int


def _hidden(down: Linear) -> tuple[dict[fx.Node, _Start], list[fx.Node]] | None:
    """Returns the results of the first layers, and the elementwise operations and reshapes after them, in
    order; None where a node between the layers is another, or is read elsewhere.
    """
    starts: dict[fx.Node, _Start] = {}
    between: set[fx.Node] = set()
    waiting = [down.rows]
    while waiting:
        node = waiting.pop()
        if node in starts or node in between:
            continue
        start = _start(node, down.in_features)
        if start is not None:
            starts[node] = start
        elif _works_by_entry(node):
            between.add(node)
            waiting += _tensors(node)
        else:
            return None
    in_order = [node for node in down.node.graph.nodes if node in between]
    layers = {start.layer.node for start in starts.values()}
    views = (view for layer in layers for view in views_of(layer))
    inside = {*layers, *views, *between, down.node}
    read_elsewhere = any(user not in inside for node in inside - {down.node} for user in node.users)
    return (starts, in_order) if starts and not read_elsewhere else None


def _start(node: fx.Node, width: int) -> _Start | None:
    """Returns the part of a first layer that a node is; None if it has not every row in order."""
    layer = layer_under(node)
    if layer is None or layer.out_features % width:
        return None
    if layer.out_features == width:
        return _Start(layer, 0) if node is layer.node else None
    value = node.meta["val"]
    first = value.storage_offset() if isinstance(value, Tensor) else None
    if not isinstance(first, int) or first % width or (value.shape[-1], value.stride(-1)) != (width, 1):
        return None
    if sum(not isinstance(size, int) for size in value.shape) > 1:  # only one can be told by the others
        return None
    step: Any = layer.out_features  # from a row to the next
    for size, stride in zip(value.shape[-2::-1], value.stride()[-2::-1], strict=True):
        if expression(stride) != expression(step):
            return None
        step = step * size
    has_every_row = expression(step) == expression(layer.out_features * layer.node.meta["val"].shape[0])
    return _Start(layer, first // width) if has_every_row else None


def _works_by_entry(node: fx.Node) -> bool:
    """Whether every entry of a result comes from the same entry of its arguments, whatever their width."""
    if keeps_features(node):
        return True
    is_copy = node.target is aten._to_copy.default
    if not (is_copy or (is_pointwise(node) and not draws_random_numbers(node))):
        return False
    shapes = {shape_exprs(n.meta["val"]) for n in (node, *_tensors(node))}
    return len(shapes) == 1 and bool(_tensors(node))


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]


def _is_finite_at_zero(starts: Iterable[fx.Node], between: Iterable[fx.Node], result: fx.Node) -> bool:
    """Runs the nodes between the layers on zeros."""
    values: dict[fx.Node, Any] = {
        node: torch.zeros(1, dtype=node.meta["val"].dtype, device="cpu") for node in starts
    }
    for node in between:
        if keeps_features(node):
            values[node] = values[node.all_input_nodes[0]]
            continue
        # Numbers of the graph have no value here, and the zeros lie on the CPU.
        if any(n not in values for n in node.all_input_nodes) or "device" in node.kwargs:
            return False
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
    return bool(torch.isfinite(values[result]).all())


def _pad(down: Linear, starts: Mapping[fx.Node, _Start], between: Iterable[fx.Node], padded: int) -> None:
    graph, width = down.node.graph, down.in_features
    for layer in dict.fromkeys(start.layer for start in starts.values()):
        parts = layer.out_features // width
        layer.derive_outputs(functools.partial(pad_rows, rows=padded, parts=parts))
    for node, start in starts.items():
        if node is not start.layer.node:
            node.replace_all_uses_with(_read(graph, node, start, padded))
    for node in between:
        if is_reshape(node):
            shape: Any = node.args[1]
            node.args = (node.args[0], [*shape[:-1], padded if shape[-1] == width else shape[-1]])
        retrace(node)
    columns = functools.partial(pad_columns, columns=padded)
    current = linear_of(down.node)  # it may have read a first layer as it was
    assert current is not None
    current.replace_parameters(derived_parameter(graph, columns, down.weight), down.bias)


def _read(graph: fx.Graph, node: fx.Node, start: _Start, padded: int) -> fx.Node:
    first = start.part * padded
    with graph.inserting_before(node):
        part = call_function(graph, aten.slice.Tensor, start.layer.node, 1, first, first + padded)
        leading = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape[:-1]]
        return (
            part if len(leading) == 1 else call_function(graph, aten.view.default, part, [*leading, padded])
        )
