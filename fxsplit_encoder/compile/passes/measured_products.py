"""Linear layers become `fxsplit::linear`, whose kernel is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.passes.gelu_epilogue import addmm_gelu
from fxsplit_encoder.compile.passes.layers import linear_of
from fxsplit_encoder.compile.rewriting import call_function, is_parameter
from fxsplit_encoder.products import linear

aten = torch.ops.aten

# There is nothing to choose from for other dtypes on CUDA, and Inductor adds their bias in the kernel after
# them.
_DTYPES = (torch.bfloat16, torch.float16)


def measured_products(module: fx.GraphModule) -> int:
    """Linear layers, each with the tanh GELU after it, run by the kernel that was measured to be the fastest
    for their number of rows.

    Exact: every kernel computes activation(rows @ weight.T + bias), sums in float32, and is refused where its
    error is more than a twentieth above that of torch's own product. The residual addition stays outside:
    Inductor fuses it with the norm after it, at less than it costs the product. So where torch's product is
    chosen, the same kernels run as without the pass.
    """
    changed = 0
    for node in list(module.graph.nodes):
        call = _call_of(node)
        if call is None or not _has_choice(node):
            continue
        with module.graph.inserting_before(node):
            measured = call_function(module.graph, linear, *call)
        node.replace_all_uses_with(measured)
        module.graph.erase_node(node)
        changed += 1
    return changed


def _call_of(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, str] | None:
    """The rows, weight, bias and activation of a linear layer; None if a node is none."""
    found = linear_of(node)
    if found is not None:
        return found.rows, found.weight, found.bias, "none"
    if node.target is not addmm_gelu:
        return None
    bias, rows, matrix = node.args
    if (
        not isinstance(matrix, fx.Node)
        or matrix.target is not aten.t.default
        or not is_parameter(matrix.args[0])
    ):
        return None
    return rows, matrix.args[0], bias, "gelu_tanh"  # type: ignore[return-value]


def _has_choice(node: fx.Node) -> bool:
    value: Any = node.meta["val"]
    return value.dtype in _DTYPES or value.device.type != "cuda"
