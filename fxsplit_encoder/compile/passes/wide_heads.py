"""Stores attention heads at the next multiple of 16: kernels round to it, and mask the last columns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxsplit_encoder.compile.passes.layers import VIEWS, Linear, layer_under, linear_of, views_of
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_columns, padded_width
from fxsplit_encoder.compile.rewriting import at_every_node, call_function, derived_parameter
from fxsplit_encoder.kernels.attention import dense_attention, varlen_attention

aten = torch.ops.aten

_STEP = 16

# The dimensions that are not heads and features, of inputs and results: (tokens, heads, width) and (batch,
# heads, tokens, width).
_TOKENS: dict[Any, tuple[int, ...]] = {varlen_attention: (0,), dense_attention: (0, 2)}
_HEADS = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Output features of a linear layer that are one attention input: `heads` times `width` of them."""

    first: int
    stride: int
    """From a head to the next."""
    heads: int
    width: int
    wide: int
    """The width that they are stored at."""


def stored_width(width: int) -> int:
    """Returns the stored width of heads, where the graph around attention has the form for it."""
    return padded_width(width, _STEP)


def arrange_heads(weight: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """Returns the rows of a weight, or entries of a bias, of pieces, each head padded with zeros."""
    parts = []
    for piece in pieces:
        heads = torch.arange(piece.heads, device=weight.device)[:, None] * piece.stride
        rows = weight[piece.first + heads + torch.arange(piece.width, device=weight.device)]
        trailing = [0, 0] * (weight.dim() - 1)
        parts.append(F.pad(rows, [*trailing, 0, piece.wide - piece.width]).flatten(0, 1))
    return torch.cat(parts)


@at_every_node
def wide_heads(node: fx.Node) -> bool:
    """Pads attention heads whose width is no multiple of 16 with zeros up to the next one.

    Exact: products of queries and keys gain zeros as terms; further columns of the values are zero, and so
    are those of the result, which meet columns of zeros in the layer that reads it. Results of linear layers
    are made wide by rows of zeros in their weights; others, as of rotary embeddings, are padded.
    """
    layers = _layers_around(node) if node.target in _TOKENS else None
    if layers is not None:
        _widen(node, *layers)
    return layers is not None


@dataclass(frozen=True, slots=True)
class _Root:
    linear: Linear
    inputs: dict[int, Piece]
    """By the position among the inputs of attention: 0 to 2."""
    kept: dict[fx.Node, Piece]
    """Views of its output that something else computes with, (tokens, heads, width) or (tokens, features)."""


def _layers_around(node: fx.Node) -> tuple[list[_Root], Linear] | None:
    """Returns the layers before and after; None: the width is right, or the graph has another form."""
    shape, dims = node.meta["val"].shape, _TOKENS[node.target]
    sizes = (shape[_HEADS], shape[-1], *(shape[dim] for dim in dims[1:]))
    if not all(isinstance(size, int) for size in sizes):
        return None
    heads, width = sizes[:2]
    wide = stored_width(width)
    if wide == width:
        return None
    down = _reader(node, heads * width)
    if down is None:
        return None
    roots: dict[fx.Node, _Root] = {}
    for position, given in enumerate(node.args[:3]):
        linear = layer_under(given)
        if linear is None:
            continue
        piece = _piece(given, linear, heads, width, dims)
        if piece is None:
            return None
        root = roots.setdefault(linear.node, _Root(linear, {}, {}))
        root.inputs[position] = dataclasses.replace(piece, wide=wide)
    if not all(_find_kept(root, node, heads, width) for root in roots.values()):
        return None
    return [*roots.values()], down


def _piece(node: Any, linear: Linear, heads: int, width: int, dims: tuple[int, ...]) -> Piece | None:
    """Returns the features of every token, by heads, that a view of a layer's output has; None: others."""
    value, features = node.meta["val"], linear.out_features
    if not isinstance(value, Tensor) or value.dim() != len(dims) + 2:
        return None
    strides, first = value.stride(), value.storage_offset()
    # Of every row of the output, in order: a second dimension of tokens lies within the first.
    steps = [features, *(features * value.shape[dim] for dim in dims[:0:-1])][::-1]
    if (value.shape[_HEADS], value.shape[-1], strides[-1]) != (heads, width, 1):
        return None
    if [strides[dim] for dim in dims] != steps or not isinstance(first, int):
        return None
    if first + (heads - 1) * strides[_HEADS] + width > features:
        return None
    return Piece(first, strides[_HEADS], heads, width, width)


def _find_kept(root: _Root, attention: fx.Node, heads: int, width: int) -> bool:
    """Finds the views that nodes other than attention read; False if one has another form."""
    inputs = {attention.args[position] for position in root.inputs}
    # In order: equal blocks are to compute their parts in the same one, so that they share a compilation.
    views = dict.fromkeys((root.linear.node, *views_of(root.linear.node)))
    for view in views:
        others = [user for user in view.users if user not in views]
        if not [user for user in others if user is not attention or view not in inputs]:
            continue
        found = None
        node: Any = view
        while node is not root.linear.node:
            piece = _piece(node, root.linear, heads, width, (0,))
            if piece is not None and piece.stride == width:
                found = node, piece
            elif found is None and (piece := _columns(node, root.linear)) is not None:
                found = node, piece
            node = node.args[0]
        if found is None:
            return False
        root.kept[found[0]] = found[1]
    return True


def _columns(node: Any, linear: Linear) -> Piece | None:
    """Returns the features of every row of a (tokens, features) view of a layer's output, as one head."""
    value, features = node.meta["val"], linear.out_features
    if not isinstance(value, Tensor) or value.dim() != 2 or value.stride() != (features, 1):
        return None
    width: Any = value.shape[1]
    first: Any = value.storage_offset()
    if not all(isinstance(number, int) for number in (width, first)) or width >= features:
        return None
    return Piece(first, width, 1, width, width)


def _reader(node: fx.Node, features: int) -> Linear | None:
    """Returns the linear layer that alone reads the result, token by token."""
    while len(node.users) == 1:
        (user,) = node.users
        linear = linear_of(user)
        if linear is not None:
            in_order = linear.rows is node and tuple(node.meta["val"].stride()) == (features, 1)
            return linear if in_order and linear.in_features == features else None
        if user.target not in VIEWS or user.target is operator.getitem:
            return None
        node = user
    return None


def _widen(node: fx.Node, roots: list[_Root], down: Linear) -> None:
    graph, shape, dims = node.graph, node.meta["val"].shape, _TOKENS[node.target]
    tokens, heads, width = [shape[dim] for dim in dims[1:]], shape[_HEADS], shape[-1]
    wide = stored_width(width)
    inputs: dict[int, fx.Node] = {}
    for root in roots:
        inputs |= _widen_root(graph, root, tokens)
    with graph.inserting_before(node):
        for position, given in enumerate(node.args[:3]):
            if position not in inputs:
                padding = [0, wide - width]
                inputs[position] = call_function(graph, aten.constant_pad_nd.default, given, padding)
        result = call_function(graph, node.target, *(inputs[i] for i in range(3)), *node.args[3:])
        if len(dims) == 2:
            result = call_function(graph, aten.transpose.int, result, 1, 2)
        rows = call_function(graph, aten.view.default, result, [-1, heads * wide])
    pad = functools.partial(pad_columns, columns=wide, parts=heads)
    down = dataclasses.replace(down, rows=rows)
    down.replace_parameters(derived_parameter(graph, pad, down.weight), down.bias)


def _widen_root(graph: fx.Graph, root: _Root, tokens: list[int]) -> dict[int, fx.Node]:
    """Makes a layer compute the wide features; returns attention's inputs by position."""
    linear = root.linear
    pieces = (*root.kept.values(), *root.inputs.values())
    linear.derive_outputs(functools.partial(arrange_heads, pieces=pieces))
    sizes = [piece.heads * piece.wide for piece in pieces]
    kept, read = [*root.kept], list[fx.Node]()
    with graph.inserting_before(linear.node.next):
        for piece, size, end in zip(pieces, sizes, itertools.accumulate(sizes), strict=True):
            heads = call_function(graph, aten.slice.Tensor, linear.node, 1, end - size, end)
            is_input = len(read) >= len(root.kept)
            if is_input or kept[len(read)].meta["val"].dim() == 3:
                shape = [-1, *(tokens if is_input else ()), piece.heads, piece.wide]
                heads = call_function(graph, aten.view.default, heads, shape)
            if is_input and tokens:
                heads = call_function(graph, aten.transpose.int, heads, 1, 2)
            read.append(heads)
    for node, heads in zip(kept, read, strict=False):
        node.replace_all_uses_with(heads)
    return dict(zip(root.inputs, read[len(kept) :], strict=True))
