"""Replace a convolution whose windows do not overlap, a patch embedding, by a matrix product."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import fake_mode_of
from fxsplit_encoder.compile.layouts import inductor_chooses_layouts, traced_downstream
from fxsplit_encoder.compile.passes.layers import product
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_columns
from fxsplit_encoder.compile.rewriting import call_function, derived_parameter, is_parameter

aten = torch.ops.aten

# Entries of 16 bits that make up the 16 bytes that a fast product reads at once.
_ALIGNMENT = 8


def conv_to_linear(module: fx.GraphModule) -> int:
    """Replaces patch embeddings, convolutions whose stride is their kernel, by linear layers.

    Exact: each of their sums is the inner product of one flattened window of the input with a flattened
    filter. A remainder of the input that fills no window, which no convolution reads, is cut off first.
    The product stores the features of a window side by side; a convolution stays where an operation after it
    cannot read that, and one of a pixel where Inductor chooses the layouts of a net: it reads any of them.
    cuDNN's 3-D convolution took 15 % of the GPU time of a 256-patch image of Qwen3-VL-8B.
    """
    nodes = module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    narrowest = 2 if inductor_chooses_layouts(module.graph) else 1
    due = [node for node in nodes if _has_separate_windows(node, narrowest)]
    return sum(_replace_by_product(module.graph, node) for node in due)


def _has_separate_windows(node: fx.Node, narrowest: int) -> bool:
    """Whether a convolution reads no pixel twice, in windows of at least so many pixels."""
    source, weight, _, _, padding, dilation, transposed, _, groups = _arguments(node)
    if not all(isinstance(size, int) for size in source.meta["val"].shape[1:]) or transposed or groups != 1:
        return False
    if weight.meta["val"].shape[2:].numel() < narrowest:
        return False
    return (
        all(step == width or count == 1 for count, width, step in _windows_by_dim(node))
        and all(p == 0 for p in padding)
        and all(d == 1 for d in dilation)
        and weight.meta["val"].is_contiguous()
    )


def _windows_by_dim(node: fx.Node) -> list[tuple[int, int, int]]:
    """Returns (number of windows, width, stride) of each dimension of space, without padding."""
    source, weight, _, stride, *_ = _arguments(node)
    sizes, kernel = source.meta["val"].shape[2:], weight.meta["val"].shape[2:]
    steps = tuple(stride) * (len(kernel) if len(stride) == 1 else 1)
    return [(1 + (s - k) // step, k, step) for s, k, step in zip(sizes, kernel, steps, strict=True)]


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.args)


def _replace_by_product(graph: fx.Graph, node: fx.Node) -> bool:
    """Puts a product in the place of a convolution; False if an operation cannot read its result."""
    downstream = traced_downstream({node: _by_window(node)})
    if downstream is None:
        return False
    source, weight, bias, *_ = _arguments(node)
    out_channels = weight.meta["val"].shape[0]
    windows = _windows_by_dim(node)
    with graph.inserting_before(node):
        for dim, (count, width, _) in enumerate(windows, start=2):
            if source.meta["val"].shape[dim] != count * width:  # a convolution does not read the rest
                source = call_function(graph, aten.slice.Tensor, source, dim, 0, count * width)
        rows, grid = _windows(graph, source, [width for _, width, _ in windows])
        rows, filters = _aligned(graph, rows, weight)
        result = product(graph, rows, call_function(graph, aten.t.default, filters), bias)
        if grid[1:] == [1] * len(grid[1:]):
            shape = [grid[0], out_channels, *grid[1:]]
            replacement = call_function(graph, aten.view.default, result, shape)
        else:
            by_window = call_function(graph, aten.view.default, result, [*grid, out_channels])
            dims = [0, len(grid), *range(1, len(grid))]
            replacement = call_function(graph, aten.permute.default, by_window, dims)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
    for each, value in downstream.items():
        each.meta["val"] = value
    return True


def _by_window(node: fx.Node) -> Tensor:
    """Returns the traced value of the product: the convolution's, but stored window by window."""
    value: Tensor = node.meta["val"]
    with fake_mode_of([value]):
        if all(count == 1 for count, _, _ in _windows_by_dim(node)):
            return value.new_empty(value.shape)
        return value.new_empty((value.shape[0], *value.shape[2:], value.shape[1])).movedim(-1, 1)


def _windows(graph: fx.Graph, source: fx.Node, kernel: list[int]) -> tuple[fx.Node, list[Any]]:
    """Returns (windows, channels * entries of the kernel), and the sizes of batch and windows."""
    batch, channels, *sizes = source.meta["val"].shape
    grid: list[Any] = [size // width for size, width in zip(sizes, kernel, strict=True)]
    count = batch if isinstance(batch, int) else call_function(graph, aten.sym_size.int, source, 0)
    features = channels * math.prod(kernel)
    if math.prod(grid) == 1 and source.meta["val"].is_contiguous():
        return call_function(graph, aten.view.default, source, [count, features]), [count, *grid]
    split = [count, channels, *itertools.chain.from_iterable(zip(grid, kernel, strict=True))]
    parts = call_function(graph, aten.view.default, source, split)
    dims = len(grid)
    permutation = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    permuted = call_function(graph, aten.permute.default, parts, permutation)
    copied = call_function(graph, aten.clone.default, permuted, memory_format=torch.contiguous_format)
    return call_function(graph, aten.view.default, copied, [-1, features]), [count, *grid]


def _aligned(graph: fx.Graph, rows: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns the rows and the filters, (out_channels, features), at a width that the GPU reads fast."""
    features = math.prod(weight.meta["val"].shape[1:])
    value = weight.meta["val"]
    missing = -features % _ALIGNMENT if value.is_cuda and value.element_size() == 2 else 0
    if missing == 0 or not is_parameter(weight):
        shape = [value.shape[0], features]
        return rows, call_function(graph, aten.view.default, weight, shape)
    filters = derived_parameter(graph, functools.partial(pad_columns, columns=features + missing), weight)
    return call_function(graph, aten.constant_pad_nd.default, rows, [0, missing]), filters
