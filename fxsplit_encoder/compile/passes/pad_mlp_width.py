"""An MLP whose hidden width is no multiple of 128 is run at the next one: GPUs multiply in such tiles.

A width of 4304 padded to 4352 was measured 6 % faster in the first product and up to 20 % in the second
(H200, 1024 to 3136 rows).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import unset_fake_temporarily
from fxsplit_encoder.compile.padding.states import draws_random_numbers, is_pointwise
from fxsplit_encoder.compile.passes.layers import Linear, is_reshape, keeps_features, linear_of, linears
from fxsplit_encoder.compile.rewriting import derived_parameter, retrace
from fxsplit_encoder.compile.sizes import shape_exprs

_TILE = 128

# More padding than this part of the width costs more than whole tiles give.
_MOST_PADDING = 1 / 8


def pad_rows(weight: Tensor, rows: int) -> Tensor:
    """A weight or bias with rows of zeros appended up to `rows`."""
    return F.pad(weight, [0, 0] * (weight.dim() - 1) + [0, rows - weight.shape[0]])


def pad_columns(weight: Tensor, columns: int) -> Tensor:
    """(rows, columns before) with columns of zeros appended."""
    return F.pad(weight, [0, columns - weight.shape[1]])


def pad_mlp_width(module: fx.GraphModule) -> int:
    """Two linear layers with an elementwise function between them, gated or not, whose hidden width is no
    multiple of 128.

    Exact: the first layers get rows of zeros, so their further columns are 0; the function f maps those to
    f(0), of which is checked that it is finite; the second layer gets columns of zeros, so its sums gain f(0)
    times 0. The weights are padded once, as derived parameters.
    """
    changed = 0
    for down in linears(module.graph):
        width = down.in_features
        padded = -(-width // _TILE) * _TILE
        if padded == width or padded - width > width * _MOST_PADDING:
            continue
        hidden = _hidden(down)
        if hidden is None:
            continue
        with unset_fake_temporarily():
            is_finite = _is_finite_at_zero(hidden)
        if is_finite:
            _pad(module.graph, down, hidden, padded)
            changed += 1
    return changed


@dataclass(frozen=True, slots=True)
class _Hidden:
    """What lies between the first and the second layers of an MLP."""

    ups: dict[fx.Node, Linear]
    between: list[fx.Node]
    """Elementwise operations and reshapes, in the graph's order."""
    result: Any
    """What the second layer reads."""


def _hidden(down: Linear) -> _Hidden | None:
    """None where anything between the layers is not elementwise in the hidden values, or read elsewhere."""
    ups: dict[fx.Node, Linear] = {}
    between: set[fx.Node] = set()
    waiting = [down.rows]
    while waiting:
        node = waiting.pop()
        if node in ups or node in between:
            continue
        linear = linear_of(node)
        if linear is not None and linear.out_features == down.in_features:
            ups[node] = linear
        elif _works_by_entry(node):
            between.add(node)
            waiting += _tensors(node)
        else:
            return None
    inside = {*ups, *between, down.node}
    if not ups or any(user not in inside for node in inside - {down.node} for user in node.users):
        return None
    return _Hidden(ups, [node for node in down.node.graph.nodes if node in between], down.rows)


def _works_by_entry(node: fx.Node) -> bool:
    """Whether every entry of a result comes from the same entry of its arguments, whatever their width."""
    if keeps_features(node):
        return True
    if not _is_elementwise(node):
        return False
    shapes = {shape_exprs(n.meta["val"]) for n in (node, *_tensors(node))}
    return len(shapes) == 1 and bool(_tensors(node))


def _is_elementwise(node: fx.Node) -> bool:
    copies = node.target is torch.ops.aten._to_copy.default
    return copies or (is_pointwise(node) and not draws_random_numbers(node))


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]


def _is_finite_at_zero(hidden: _Hidden) -> bool:
    """Runs what lies between on a zero for every padded entry."""
    values: dict[fx.Node, Any] = {up: torch.zeros(1, dtype=up.meta["val"].dtype) for up in hidden.ups}
    for node in hidden.between:
        if keeps_features(node):
            values[node] = values[node.args[0]]  # type: ignore[index]
            continue
        # Numbers of the graph have no value here, and the zeros lie on the CPU.
        if any(n not in values for n in node.all_input_nodes) or "device" in node.kwargs:
            return False
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
    return bool(torch.isfinite(values[hidden.result]).all())


def _pad(graph: fx.Graph, down: Linear, hidden: _Hidden, padded: int) -> None:
    width = down.in_features
    rows = functools.partial(pad_rows, rows=padded)
    for up in hidden.ups.values():
        bias = None if up.bias is None else derived_parameter(graph, rows, up.bias)
        up.replace_parameters(derived_parameter(graph, rows, up.weight), bias)
        retrace(up.node)
    _retrace(hidden.between, width, padded)
    columns = functools.partial(pad_columns, columns=padded)
    down.replace_parameters(derived_parameter(graph, columns, down.weight), down.bias)
    retrace(down.node)


def _retrace(between: Iterable[fx.Node], width: int, padded: int) -> None:
    for node in between:
        if is_reshape(node):
            shape: Any = node.args[1]
            node.args = (node.args[0], [*shape[:-1], padded if shape[-1] == width else shape[-1]])
        retrace(node)
