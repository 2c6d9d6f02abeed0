"""Graph passes: exact rewrites of the ATen graph, before it is split. Each is a function that returns how
often it applied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import fx

aten = torch.ops.aten


def convolution_to_linear(module: fx.GraphModule) -> int:
    """A convolution whose kernel covers its whole input once is a matrix product: the patch embedding of
    every packed tower.

    cuDNN's 3-D convolution took 15 % of the GPU time of a 256-patch image (H200, Qwen3-VL-8B).
    """
    applied = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if _covers_input_once(node):
            _replace_by_addmm(module.graph, node)
            applied += 1
    if applied:
        module.graph.eliminate_dead_code()
    return applied


def _covers_input_once(node: fx.Node) -> bool:
    source, weight, _, _, padding, dilation, transposed, _, groups = _arguments(node)
    spatial = source.meta["val"].shape[2:]
    kernel = weight.meta["val"].shape[2:]
    return (
        all(isinstance(s, int) for s in spatial)
        and tuple(spatial) == tuple(kernel)
        and all(p == 0 for p in padding)
        and all(d == 1 for d in dilation)
        and not transposed
        and groups == 1
        and source.meta["val"].is_contiguous()
        and weight.meta["val"].is_contiguous()
    )


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.args)


def _replace_by_addmm(graph: fx.Graph, node: fx.Node) -> None:
    source, weight, bias, *_ = _arguments(node)
    out_features, *fan_in = weight.meta["val"].shape
    features = math.prod(fan_in)

    def add(target: Any, *args: Any) -> fx.Node:
        new = graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        with _fake_mode_of(node):
            new.meta["val"] = target(*values)
        return new

    with graph.inserting_before(node):
        rows = source.meta["val"].shape[0]
        row_count = rows if isinstance(rows, int) else _symbol_node(graph, source, rows)
        flat = add(aten.view.default, source, [row_count, features])
        matrix = add(aten.t.default, add(aten.view.default, weight, [out_features, features]))
        product = (
            add(aten.mm.default, flat, matrix)
            if bias is None
            else add(aten.addmm.default, bias, flat, matrix)
        )
        replacement = add(aten.view.default, product, [row_count, out_features] + [1] * (len(fan_in) - 1))
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def _symbol_node(graph: fx.Graph, source: fx.Node, size: torch.SymInt) -> fx.Node:
    node = graph.call_function(aten.sym_size.int, (source, 0))
    node.meta["val"] = size
    return node


def _fake_mode_of(node: fx.Node) -> Any:
    return node.meta["val"].fake_mode


PASSES: Mapping[str, Callable[[fx.GraphModule], int]] = {"convolution_to_linear": convolution_to_linear}
