"""Lookups by index: rows of indices in a shared table, and rows in another order."""

from __future__ import annotations

import torch

from fxsplit_encoder.compile.padding.rules.registry import PERMUTE_ROWS, rule
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State


@rule("embedding")
def _embedding(view: NodeView) -> State:
    """embedding(table, indices)."""
    view.require_shared(0)
    view.require_safe_lookup()
    return Rows(view.rows(1))


@rule("index")
def _index(view: NodeView) -> State:
    """table[indices]: a shared table looked up by rows; indices into rows would let tokens read one
    another.
    """
    view.require_shared(0)
    indices = view.arg(1)
    given = [i for i in indices if i is not None]
    if indices[0] is None or any(not isinstance(view.state(i), Rows) for i in given):
        raise view.fail("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    rank = max(i.meta["val"].dim() for i in given)
    dims = {view.state(i).dim + rank - i.meta["val"].dim() for i in given}
    if len(dims) != 1 or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in given):
        raise view.fail("gathers with a pattern that is not one lookup a row")
    return Rows(dims.pop())


@rule("index_select")
def _index_select(view: NodeView) -> State:
    """index_select(table, dim, indices)."""
    view.require_shared(0)
    if view.dim(view.arg(1)) != 0:
        raise view.fail("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    return Rows(view.rows(2))


@rule(PERMUTE_ROWS)
def _permute_rows(view: NodeView) -> State:
    """The op promises that the entries of real rows are real rows; it holds for an order that comes from
    outside as it is, since padding only appends to such a one.
    """
    if view.rows(0) != 0 or view.rows(1) != 0 or view.arg(1) not in view.analysis.seeds:
        raise view.fail("takes an order of rows that does not enter the graph as it is")
    return Rows(0)
