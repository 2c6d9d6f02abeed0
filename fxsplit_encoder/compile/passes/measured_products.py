"""Linear layers become `fxsplit::linear`, whose kernel is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.passes.layers import linear_of
from fxsplit_encoder.compile.rewriting import call_function
from fxsplit_encoder.products import linear

# There is nothing to choose from for other dtypes on CUDA, and Inductor adds their bias in the kernel after
# them.
_DTYPES = (torch.bfloat16, torch.float16)


def measured_products(module: fx.GraphModule) -> int:
    """Linear layers without an activation run by the kernel that was measured to be the fastest for their
    number of rows.

    Exact: every kernel computes rows @ weight.T + bias, sums in float32, and is refused where its error is
    more than a twentieth above that of torch's own product. The residual addition stays outside: Inductor
    fuses it with the norm after it, at less than it costs the product. So where torch's product is chosen,
    the same kernels run as without the pass.
    """
    changed = 0
    for node in list(module.graph.nodes):
        layer = linear_of(node)
        if layer is not None and has_choice(node):
            replace_by_measured(node, layer.rows, layer.weight, layer.bias, "none")
            changed += 1
    return changed


def has_choice(node: fx.Node) -> bool:
    """Whether there is more than one kernel for a layer that gives what this node does."""
    value: Any = node.meta["val"]
    return value.dtype in _DTYPES or value.device.type != "cuda"


def replace_by_measured(
    node: fx.Node, rows: Any, weight: Any, bias: Any, activation: str, *, keep: bool = False
) -> None:
    """Has a measured layer take a node's place.

    Args:
        keep: whether the node stays in the graph, without users.
    """
    with node.graph.inserting_before(node):
        measured = call_function(node.graph, linear, rows, weight, bias, activation)
    node.replace_all_uses_with(measured)
    if not keep:
        node.graph.erase_node(node)
