"""Masks that keep pad rows finite without giving attention any more work.

An attention kernel leaves the rows outside every segment unwritten. Whatever lies in that memory must not
reach the values that the next attention reads, since FlashAttention reads value rows past the last segment
and 0 * NaN is NaN. So the pad rows are set to zero after each attention, at the first pointwise operation
(the residual addition), where Inductor fuses the mask into a kernel that runs anyway. Between the two only
operations that work row by row are passed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsplit_encoder._torch.aot import fake_mode_of
from fxsplit_encoder._torch.dispatch import has_tag
from fxsplit_encoder.compile.sizes import expression

aten = torch.ops.aten

_ROWWISE = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
    aten._to_copy.default,
    aten.mm.default,
    aten.linear.default,
)


def mask_pad_rows(module: fx.GraphModule, attentions: list[fx.Node]) -> fx.Node | None:
    """Masks the pad rows after each attention; returns the new input that holds the number of real rows.

    Args:
        module: an ATen graph.
        attentions: its packed attentions, (tokens, heads, head_dim) each.

    Returns:
        A placeholder, the graph's last, for a 0-dimensional int64 tensor; None without attentions.
    """
    # Only rows that are the tokens themselves are counted by `num_rows`; a constant number of them is never
    # padded.
    attentions = [n for n in attentions if expression(n.meta["val"].shape[0]).is_Symbol]
    if not attentions:
        return None
    graph = module.graph
    fake_mode: Any = fake_mode_of([attentions[0].meta["val"]])
    device = attentions[0].meta["val"].device
    last_input = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
    with graph.inserting_after(last_input):
        num_rows = graph.placeholder("num_rows")
    with fake_mode:
        num_rows.meta["val"] = torch.empty((), dtype=torch.int64, device=device)
    for attention in attentions:
        _mask(graph, _first_pointwise(attention), num_rows, fake_mode)
    return num_rows


def _first_pointwise(attention: fx.Node) -> fx.Node:
    """The node to mask: the first pointwise operation after an attention, or the attention itself."""
    rows = expression(attention.meta["val"].shape[0])
    node = attention
    while len(node.users) == 1:
        user = next(iter(node.users))
        value = user.meta.get("val")
        if not isinstance(value, torch.Tensor):
            break
        if (
            has_tag(user.target, torch.Tag.pointwise)
            and value.dim() > 0
            and expression(value.shape[0]) == rows
        ):
            return user
        if not (user.target in _ROWWISE or (user.target is aten.addmm.default and user.args[1] is node)):
            break
        if user.target in (aten.mm.default, aten.linear.default) and user.args[0] is not node:
            break
        node = user
    return attention


def _mask(graph: fx.Graph, node: fx.Node, num_rows: fx.Node, fake_mode: Any) -> None:
    users = list(node.users)
    value = node.meta["val"]

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake_mode:
            new.meta["val"] = target(*values[0], **values[1])
        return new

    with graph.inserting_after(node):
        count = graph.call_function(aten.sym_size.int, (node, 0))
        count.meta["val"] = value.shape[0]
    with graph.inserting_after(count):
        row = add(aten.arange.default, count, device=value.device)
    with graph.inserting_after(row):
        is_padding = add(aten.ge.Tensor, row, num_rows)
    with graph.inserting_after(is_padding):
        shaped = add(aten.view.default, is_padding, [count] + [1] * (value.dim() - 1))
    with graph.inserting_after(shaped):
        masked = add(aten.masked_fill.Scalar, node, shaped, 0)
    for user in users:
        user.replace_input_with(node, masked)
