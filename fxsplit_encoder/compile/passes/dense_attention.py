"""Replace attention over a batch by `fxsplit::dense_attention`, which has more kernels than torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.passes.layers import is_only_result
from fxsplit_encoder.compile.rewriting import arguments_of, call_function
from fxsplit_encoder.compile.sizes import shape_exprs
from fxsplit_encoder.kernels.attention import dense_attention as attend

aten = torch.ops.aten

TORCH_KERNELS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""What AOT makes of scaled_dot_product_attention."""


def dense_attention(module: fx.GraphModule) -> int:
    """Replaces 16-bit attention over equally long sequences, without a mask, by an op with measured kernels.

    Exact: it is the same attention, and no kernel is chosen that is less accurate than torch's own (see
    `attention.chooser`). It stays where inputs are not stored as by a linear layer: most would need copies.
    """
    nodes = [node for node in module.graph.nodes if attends_plainly(node) and _is_fast(node)]
    for node in nodes:
        replace_by_dense_attention(module.graph, node)
    return len(nodes)


def attends_plainly(node: fx.Node) -> bool:
    """Whether a node is attention over a batch without a mask, of which only the first result is read."""
    if node.target not in TORCH_KERNELS:
        return False
    given = arguments_of(node)
    bias = given.get("attn_bias", given.get("attn_mask"))
    if bias is not None or given["dropout_p"] or given["is_causal"] or not is_only_result(node):
        return False
    query, key, value = (shape_exprs(given[name].meta["val"]) for name in ("query", "key", "value"))
    return query == key == value


def _is_fast(node: fx.Node) -> bool:
    given = arguments_of(node)
    values = [*(given[name].meta["val"] for name in ("query", "key", "value")), node.meta["val"][0]]
    return values[0].dtype in (torch.bfloat16, torch.float16) and all(map(_is_packed, values))


def _is_packed(value_BHTD: Tensor) -> bool:
    """Whether tokens of all sequences are rows of one matrix at one stride, of fixed sizes."""
    tokens, strides = value_BHTD.shape[2], value_BHTD.stride()
    if not all(isinstance(number, int) for number in (*value_BHTD.shape[1:], *strides)):
        return False
    return strides[3] == 1 and strides[0] == tokens * strides[2]


def replace_by_dense_attention(graph: fx.Graph, node: fx.Node) -> None:
    """Puts `fxsplit::dense_attention` in the place of attention for which `attends_plainly` holds."""
    given: dict[str, Any] = arguments_of(node)
    query = given["query"]
    scale = given["scale"] if given["scale"] is not None else query.meta["val"].shape[-1] ** -0.5
    with graph.inserting_before(node):
        attended = call_function(graph, attend, query, given["key"], given["value"], scale)
    for user in list(node.users):
        user.replace_all_uses_with(attended)
        graph.erase_node(user)
    graph.erase_node(node)
