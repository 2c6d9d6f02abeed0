"""Move an attention bias that is a sum over rows and columns of a grid into queries and keys.

Relative positions as in ViTDet (arXiv 2203.16527) give every score one term for the row of the key and one
for its column. Their sum is as large as the scores: 400 MB for one image of 1024 pixels in SAM.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import fake_mode_of
from fxsplit_encoder.compile.passes.layers import Attention, attention_of
from fxsplit_encoder.compile.rewriting import at_every_node, call_function
from fxsplit_encoder.compile.sizes import shape_exprs

aten = torch.ops.aten

_CPU_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_CUDNN = aten._scaled_dot_product_cudnn_attention.default

# What AOT makes of an attention with a bias, and the kernel that takes over. On CUDA that is cuDNN's, whose
# values may be narrower than the keys (docs/passes.md).
_KERNELS: dict[Any, Any] = {
    _CPU_FLASH: _CPU_FLASH,
    aten._scaled_dot_product_efficient_attention.default: _CUDNN,
    _CUDNN: _CUDNN,
}

# Divided by the scale, a large term overflows float16.
_DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}

_PRODUCTS = (aten.bmm.default, aten.mm.default, aten.addmm.default)
_VIEWS = (
    *(aten.view.default, aten._unsafe_view.default, aten.clone.default, aten.expand.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default, aten.transpose.int),
)

# Both take heads whose width is a multiple of 8, up to 256.
_WIDTH_STEP, _MOST_WIDTH = 8, 256


@at_every_node
def decomposed_bias(node: fx.Node) -> bool:
    """Widens heads of attention over a grid whose bias is a term for the key's row and one for its column.

    Exact: a query with its terms among its features, divided by the scale, a power of two, times a key with a
    one at its row and at its column there is the biased score, without rounding of the terms' sum. The terms
    are products, so they are finite: a mask's minus infinity times zeros would be NaN.
    """
    biased = _biased(node)
    if biased is not None:
        _replace(node.graph, biased)
    return biased is not None


@dataclass(frozen=True, slots=True)
class _Biased:
    """An attention whose bias is `rows + columns`."""

    attention: Attention
    rows: fx.Node
    """(..., grid rows, 1), batch, heads and queries in front."""
    columns: fx.Node
    """(..., 1, grid columns)."""

    @property
    def grid(self) -> tuple[int, int]:
        return _value(self.rows).shape[-2], _value(self.columns).shape[-1]

    @property
    def width(self) -> int:
        return -(-(_value(self.attention.query).shape[-1] + sum(self.grid)) // _WIDTH_STEP) * _WIDTH_STEP


def _biased(node: fx.Node) -> _Biased | None:
    attention = attention_of(node)
    if attention is None or attention.bias is None:
        return None
    query, key, value = attention.query, attention.key, attention.value
    if shape_exprs(_value(attention.bias))[:3] != shape_exprs(_value(query))[:3]:
        return None  # it is broadcast
    if not all(isinstance(size, int) for each in (query, key, value) for size in _value(each).shape[1:]):
        return None  # the grid's size is not known
    summed = _in_order(attention.bias)
    if summed.target is not aten.add.Tensor or summed.kwargs:
        return None
    first, second = summed.args
    terms = next((t for t in ((first, second), (second, first)) if _are_terms(*t, key)), None)
    if terms is None:
        return None
    found = _Biased(attention, *terms)
    is_exact = math.frexp(attention.scale)[0] == 0.5
    fits = found.width <= _MOST_WIDTH and _value(value).shape[-1] <= found.width
    runs = _value(query).dtype in _DTYPES.get(_value(query).device.type, ())
    return found if is_exact and fits and runs else None


def _in_order(node: Any) -> Any:
    """Returns the node of the same values in order, before copies and shapes."""
    while True:
        source: Any = node.args[0] if node.args else None
        if node.target in (aten.view.default, aten._unsafe_view.default, aten.clone.default):
            node = source
        elif node.target is aten.expand.default and shape_exprs(_value(node)) == shape_exprs(_value(source)):
            node = source
        elif node.target is aten.slice.Tensor and source.target is aten.constant_pad_nd.default:
            # The efficient kernel wants its bias aligned: padded, and cut again.
            unpadded = source.args[0]
            if shape_exprs(_value(node)) != shape_exprs(_value(unpadded)) or not _starts_alike(source, node):
                return node
            node = unpadded
        else:
            return node


def _starts_alike(padded: fx.Node, cut: fx.Node) -> bool:
    before: Any = padded.args[1]
    start = cut.args[2] if len(cut.args) > 2 else 0
    step = cut.args[4] if len(cut.args) > 4 else 1
    return not any(before[::2]) and start in (0, None) and step in (1, None)


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _are_terms(rows: Any, columns: Any, key: fx.Node) -> bool:
    """Whether the sum of two nodes has a term for every row of the keys' grid, and one for every column."""
    if not (_is_product(rows) and _is_product(columns)):
        return False
    if not _value(rows).dtype == _value(columns).dtype == _value(key).dtype:
        return False
    of_rows, of_columns = shape_exprs(_value(rows)), shape_exprs(_value(columns))
    if len(of_rows) < 3 or of_rows[:-2] != of_columns[:-2] or of_rows[-1] != 1 or of_columns[-2] != 1:
        return False
    num_keys = shape_exprs(_value(key))[2]
    return bool(of_rows[-2] * of_columns[-1] == num_keys)


def _is_product(node: Any) -> bool:
    """Whether a node is the result of a matrix product, moved and reshaped."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target in _PRODUCTS


def _replace(graph: fx.Graph, biased: _Biased) -> None:
    attention = biased.attention
    node, query, key, value = attention.node, attention.query, attention.key, attention.value
    batch, heads, queries, head_dim = _value(query).shape
    keys, value_dim = _value(value).shape[2:]
    rows, columns = biased.grid
    missing = biased.width - head_dim - rows - columns
    kernel = _KERNELS[node.target]
    with graph.inserting_before(node):
        count = batch if type(batch) is int else call_function(graph, aten.sym_size.int, query, 0)

        def term(source: fx.Node, width: int) -> fx.Node:
            scaled = call_function(graph, aten.mul.Tensor, source, 1 / attention.scale)
            flat = call_function(graph, aten.clone.default, scaled, memory_format=torch.contiguous_format)
            return call_function(graph, aten.view.default, flat, [count, heads, queries, width])

        def widened(source: fx.Node, by: int) -> fx.Node:
            return call_function(graph, aten.constant_pad_nd.default, source, [0, by]) if by else source

        terms = [query, term(biased.rows, rows), term(biased.columns, columns)]
        wide_query = widened(call_function(graph, aten.cat.default, terms, -1), missing)
        shape = [count, heads, keys, biased.width - head_dim]
        ones = call_function(graph, aten.expand.default, _positions(graph, biased, missing), shape)
        wide_key = call_function(graph, aten.cat.default, [key, ones], -1)
        values = [value, None, False] if kernel is _CUDNN else [widened(value, biased.width - value_dim)]
        attended = call_function(graph, kernel, wide_query, wide_key, *values, scale=attention.scale)
        narrow = call_function(graph, operator.getitem, attended, 0)
        if kernel is not _CUDNN:
            narrow = call_function(graph, aten.slice.Tensor, narrow, 3, 0, value_dim)
        placed = _with_layout(graph, narrow, node.meta["val"][0])
    attention.replace_by(placed)


def _with_layout(graph: fx.Graph, source: fx.Node, expected: Tensor) -> fx.Node:
    """Returns a copy with the layout of the result that it replaces: head by head, or token by token."""
    by_token = expected.transpose(1, 2).is_contiguous()
    ordered = call_function(graph, aten.transpose.int, source, 1, 2) if by_token else source
    copied = call_function(graph, aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return call_function(graph, aten.transpose.int, copied, 1, 2) if by_token else copied


def _positions(graph: fx.Graph, biased: _Biased, missing: int) -> fx.Node:
    """(keys, grid rows + columns + missing): ones at the row and the column of each key, to be fused."""
    rows, columns = biased.grid
    key = _value(biased.attention.key)

    def count(to: int) -> fx.Node:
        return call_function(graph, aten.arange.default, to, device=key.device)

    def is_at(indices: fx.Node, choices: int) -> fx.Node:
        column = call_function(graph, aten.unsqueeze.default, indices, 1)
        return call_function(graph, aten.eq.Tensor, column, count(choices))

    with fake_mode_of([key]):
        position = count(rows * columns)
        row = call_function(graph, aten.div.Tensor_mode, position, columns, rounding_mode="floor")
        column = call_function(graph, aten.remainder.Scalar, position, columns)
        both = call_function(graph, aten.cat.default, [is_at(row, rows), is_at(column, columns + missing)], 1)
    return call_function(graph, aten._to_copy.default, both, dtype=key.dtype)
