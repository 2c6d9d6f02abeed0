"""Rows are stored as rows: a residual stream that began transposed does not stay so.

A patch embedding by convolution gives (images, features, patches), whose transpose is (images, patches,
features) with the patches next to one another in memory. An elementwise operation keeps that layout, and
where nothing is joined to the rows (no class token), every block adds to them in it: every layer norm then
reads and every residual addition writes with the stride of a whole image. SigLIP is such a tower.
"""

from __future__ import annotations

import torch
from torch import fx

from fxsplit_encoder.compile.padding.states import is_pointwise
from fxsplit_encoder.compile.rewriting import call_function, retrace_users

aten = torch.ops.aten


def contiguous_rows(module: fx.GraphModule) -> int:
    """Elementwise operations whose rows of features, or images of rows, are stored feature by feature.

    Exact: only strides change. What is behind the first such operation follows its new layout, so that one
    copy, which a compiler fuses into the operation, replaces one a block.
    """
    changed = 0
    for node in module.graph.nodes:
        if is_pointwise(node) and _is_stored_by_feature(node) and not _is_only_copied(node):
            _copy(module.graph, node)
            changed += 1
    return changed


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    users = list(node.users)
    with graph.inserting_after(node):
        rows = call_function(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    for user in users:
        user.replace_input_with(node, rows)
    retrace_users([rows])


def _is_stored_by_feature(node: fx.Node) -> bool:
    value = node.meta["val"]
    # Of four dimensions are images, whose features may well come last. Sizes that vary are not compared: that
    # would be another guard.
    if value.dim() not in (2, 3) or not isinstance(value.shape[-1], int) or value.shape[-1] == 1:
        return False
    return not isinstance(value.stride(-1), int) or value.stride(-1) != 1


def _is_only_copied(node: fx.Node) -> bool:
    return all(user.target is aten.clone.default for user in node.users)
