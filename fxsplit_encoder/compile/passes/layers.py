"""Layers in an ATen graph: a linear layer, the reshapes around it, a call of attention."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.rewriting import (
    arguments_of,
    call_function,
    derived_parameter,
    is_parameter,
    retrace,
)
from fxsplit_encoder.compile.sizes import expression, shape_exprs

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Linear:
    """A product of rows with a transposed parameter, `rows @ weight.T + bias`, as `mm` or `addmm`."""

    node: fx.Node
    rows: fx.Node
    """(rows, in_features)."""
    weight: fx.Node
    """(out_features, in_features), a parameter."""
    bias: fx.Node | None
    """(out_features,), a parameter."""

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return int(self.weight.meta["val"].shape[1])

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return int(self.weight.meta["val"].shape[0])

    def replace_parameters(self, weight: fx.Node, bias: fx.Node | None) -> None:
        """Sets other parameters, and redoes the traced value."""
        graph = self.node.graph
        with graph.inserting_before(self.node):
            matrix = call_function(graph, aten.t.default, weight)
        self.node.args = (self.rows, matrix) if bias is None else (bias, self.rows, matrix)
        retrace(self.node)

    def derive_outputs(self, make: Callable[[Tensor], Tensor]) -> None:
        """Makes other output features: `make` returns the rows of a weight, or the entries of a bias."""
        graph = self.node.graph
        bias = None if self.bias is None else derived_parameter(graph, make, self.bias)
        self.replace_parameters(derived_parameter(graph, make, self.weight), bias)


def linear_of(node: Any) -> Linear | None:
    """Returns the linear layer that a node is; None if it is none, or has scales."""
    if not isinstance(node, fx.Node):
        return None
    arguments: tuple[Any, ...] = tuple(node.args)
    if node.target is aten.mm.default:
        bias, (rows, matrix) = None, arguments
    elif node.target is aten.addmm.default and not node.kwargs and len(arguments) == 3:
        bias, rows, matrix = arguments
    else:
        return None
    if matrix.target is not aten.t.default or not is_parameter(matrix.args[0]):
        return None
    if bias is not None and not (is_parameter(bias) and bias.meta["val"].dim() == 1):
        return None
    return Linear(node, rows, matrix.args[0], bias)


def product(graph: fx.Graph, rows: fx.Node, matrix: fx.Node, bias: fx.Node | None) -> fx.Node:
    """Adds `rows @ matrix`, and a bias if there is one."""
    if bias is None:
        return call_function(graph, aten.mm.default, rows, matrix)
    return call_function(graph, aten.addmm.default, bias, rows, matrix)


VIEWS = (
    *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.permute.default, aten.transpose.int, aten.select.int, aten.slice.Tensor),
    *(aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, operator.getitem),
)
"""Operations whose results share memory with their arguments."""


def layer_under(node: Any) -> Linear | None:
    """Returns the linear layer whose output a node is, or is a view of."""
    while linear_of(node) is None and node.target in VIEWS:
        node = node.args[0]
    return linear_of(node)


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yields every view of a node, and of these."""
    for user in node.users:
        if user.target in VIEWS:
            yield user
            yield from views_of(user)


_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def is_reshape(node: fx.Node) -> bool:
    """Whether a node reads its input in another shape."""
    return node.target in _RESHAPES


def layer_before(result: Any, is_passed: Callable[[fx.Node], bool] = is_reshape) -> Linear | None:
    """Returns the linear layer before a value, through reshapes; None: another node reads one of them."""
    while isinstance(result, fx.Node) and len(result.users) == 1:
        if (layer := linear_of(result)) is not None:
            return layer
        if not is_passed(result):
            return None
        result = result.args[0]
    return None


def are_same_rows(rows: fx.Node, others: fx.Node, is_passed: Callable[[fx.Node], bool] = is_reshape) -> bool:
    """Whether two layers read the same rows, perhaps through reshapes."""

    def source(node: Any) -> Any:
        return source(node.args[0]) if is_passed(node) else node

    shapes = {shape_exprs(each.meta["val"]) for each in (rows, others)}
    return len(shapes) == 1 and source(rows) is source(others)


def keeps_features(node: fx.Node) -> bool:
    """Whether a reshape leaves the last dimension as it is."""
    if not is_reshape(node):
        return False
    source: Any = node.args[0]
    sizes = (n.meta["val"].shape for n in (node, source))
    return len({expression(shape[-1]) for shape in sizes}) == 1


TORCH_KERNELS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""What AOT makes of scaled_dot_product_attention."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention over a batch by a kernel of torch, of which only the first result is read."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    """(batch, heads, tokens, head_dim), each of the three."""
    bias: fx.Node | None
    scale: float

    def replace_by(self, result: fx.Node) -> None:
        """Puts a value in the place of the result."""
        for user in list(self.node.users):
            user.replace_all_uses_with(result)
            result.graph.erase_node(user)
        result.graph.erase_node(self.node)


def attention_of(node: fx.Node) -> Attention | None:
    """Returns the attention that a node is; None if it is none, is causal or drops entries."""
    if node.target not in TORCH_KERNELS:
        return None
    given = arguments_of(node)
    read = [user for user in node.users if user.users or user.target is not operator.getitem]
    is_only_result = all(user.target is operator.getitem and user.args[1] == 0 for user in read)
    if given["dropout_p"] or given["is_causal"] or not is_only_result:
        return None
    query, key, value, scale = (given[name] for name in ("query", "key", "value", "scale"))
    bias = given.get("attn_bias", given.get("attn_mask"))
    width = query.meta["val"].shape[-1]
    return Attention(node, query, key, value, bias, width**-0.5 if scale is None else scale)
