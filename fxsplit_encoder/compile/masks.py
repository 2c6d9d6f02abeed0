"""Masks pad rows, which a packed attention leaves unwritten, so that they stay finite.

FlashAttention reads value rows past the last segment, and 0 * NaN is NaN. So the pad rows are set to zero
after each attention, at the first pointwise operation (the residual addition), into which Inductor fuses the
mask. Between the two only operations that work row by row are passed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxsplit_encoder._torch.aot import fake_mode_of
from fxsplit_encoder._torch.dispatch import OpOverload, has_tag
from fxsplit_encoder.compile.padding.states import TokenSizes
from fxsplit_encoder.compile.rewriting import call_function
from fxsplit_encoder.compile.sizes import assumptions_of, expression

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


def mask_pad_rows(module: fx.GraphModule, targets: Collection[Any]) -> fx.Node | None:
    """Masks the pad rows after each packed attention: splitting ops but torch's own, which write every row.
    Returns the graph's last placeholder, a 0-dimensional int64 tensor of the number of real rows; None
    without attentions.
    """
    assumptions = assumptions_of([node for node in module.graph.nodes if node.op == "placeholder"])
    found = ((node, _rows(node, assumptions)) for node in module.graph.nodes if node.target in targets)
    attentions = {node: rows for node, rows in found if rows is not None}
    if not attentions:
        return None
    graph = module.graph
    example = next(iter(attentions)).meta["val"]
    fake_mode: Any = fake_mode_of([example])
    last_input = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
    with graph.inserting_after(last_input):
        num_rows = graph.placeholder("num_rows")
    with fake_mode:
        num_rows.meta["val"] = torch.empty((), dtype=torch.int64, device=example.device)
    for attention, rows in attentions.items():
        _mask(graph, _first_pointwise(attention, rows), rows, num_rows, fake_mode)
    return num_rows


def _rows(node: fx.Node, assumptions: Sequence[sympy.Basic]) -> sympy.Expr | None:
    """Returns the rows of a splitting op; None for torch's ops and for rows that are never padded."""
    value = node.meta.get("val")
    assert isinstance(node.target, OpOverload)
    if node.target.namespace == "aten" or not isinstance(value, torch.Tensor):
        return None
    rows = next((size for size in map(expression, value.shape) if size.free_symbols), None)
    if rows is None or _dim_of(rows, value) is None:
        return None
    symbol = str(next(iter(rows.free_symbols)))
    return rows if rows.is_Symbol or TokenSizes(symbol, (), assumptions).count_tokens(rows) else None


def _dim_of(rows: sympy.Expr, value: torch.Tensor) -> int | None:
    sizes = list(map(expression, value.shape))
    dim = sizes.index(rows) if rows in sizes else None
    return dim if dim is not None and all(size == 1 for size in sizes[:dim]) else None


def _first_pointwise(attention: fx.Node, rows: sympy.Expr) -> fx.Node:
    node = attention
    while len(node.users) == 1:
        user = next(iter(node.users))
        value = user.meta.get("val")
        if not isinstance(value, torch.Tensor):
            break
        if has_tag(user.target, torch.Tag.pointwise) and _dim_of(rows, value) is not None:
            return user
        if not (user.target in _ROWWISE or (user.target is aten.addmm.default and user.args[1] is node)):
            break
        if user.target in (aten.mm.default, aten.linear.default) and user.args[0] is not node:
            break
        node = user
    return attention


def _mask(graph: fx.Graph, node: fx.Node, rows: sympy.Expr, num_rows: fx.Node, fake_mode: Any) -> None:
    users = list(node.users)
    value = node.meta["val"]
    dim = _dim_of(rows, value)
    assert dim is not None
    with fake_mode, graph.inserting_before(node.next):
        count = call_function(graph, aten.sym_size.int, node, dim)
        row = call_function(graph, aten.arange.default, count, device=value.device)
        is_padding = call_function(graph, aten.ge.Tensor, row, num_rows)
        shape = [count] + [1] * (value.dim() - 1 - dim)
        shaped = call_function(graph, aten.view.default, is_padding, shape)
        masked = call_function(graph, aten.masked_fill.Scalar, node, shaped, 0)
    for user in users:
        user.replace_input_with(node, masked)
