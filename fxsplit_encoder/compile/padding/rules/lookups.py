"""Lookups by index: rows of indices in a shared table, entries of every row, and rows in another order."""

from __future__ import annotations

from typing import Any

import torch

from fxsplit_encoder.compile.padding.rules.registry import PERMUTE_ROWS, rule
from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State


@rule("embedding")
def _embedding(view: NodeView) -> State:
    """embedding(table, indices): the entry of an index is the table's row of that number."""
    view.require_shared(0)
    view.require_safe_lookup()
    return Rows(view.rows(1))


@rule("index", "_unsafe_index")
def _index(view: NodeView) -> State:
    """x[indices]: a shared table looked up by rows of indices, each of which gives its own entries; or rows
    whose other dimensions are indexed by what is shared, the same entries of each row. Indices into rows
    would let tokens read one another.
    """
    indices = view.arg(1)
    given = [i for i in indices if i is not None]
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in given):
        raise view.unknown("selects by a mask, so that the number of entries depends on data")
    if view.state(view.arg(0)) is not SHARED:
        return _entries_of_rows(view, indices, given)
    if indices[0] is None or any(not isinstance(view.state(i), Rows) for i in given):
        raise view.unknown("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    rank = max(i.meta["val"].dim() for i in given)
    rows = {view.state(i).at(view.state(i).dim + rank - i.meta["val"].dim()) for i in given}
    if len(rows) != 1:
        raise view.unknown("gathers with a pattern that is not one lookup a row")
    return rows.pop()


def _entries_of_rows(view: NodeView, indices: list[Any], given: list[Any]) -> State:
    """Rows whose other dimensions are indexed. What several indices give takes the place of the first if they
    stand side by side, else it comes first.
    """
    rows = view.rows()
    if rows < len(indices) and indices[rows] is not None:
        raise view.fail("gathers tokens")
    if any(view.state(i) is not SHARED for i in given):
        raise view.unknown("gathers entries of every row by indices of its own")
    places = [place for place, index in enumerate(indices) if index is not None]
    rank = max(i.meta["val"].dim() for i in given)
    side_by_side = places == list(range(places[0], places[-1] + 1))
    before = sum(1 for place in places if place < rows)
    moved_in = rank if before or not side_by_side else 0
    return Rows(rows - before + moved_in)


@rule("index_select")
def _index_select(view: NodeView) -> State:
    """index_select(x, dim, indices): a shared table looked up by rows, or the same entries of every row."""
    dim = view.dim(view.arg(1))
    if view.state(view.arg(0)) is not SHARED:
        if view.state(view.arg(2)) is not SHARED or dim == view.rows():
            raise view.fail("gathers tokens")
        return Rows(view.rows())
    if dim != 0:
        raise view.unknown("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    return Rows(view.rows(2))


@rule(PERMUTE_ROWS)
def _permute_rows(view: NodeView) -> State:
    """permute_rows(rows, permutation): it permutes the real rows among themselves, for that is what the op
    promises of a permutation that enters the graph as it is: padding only appends to such a one.
    """
    if view.rows(0) != 0 or view.rows(1) != 0 or view.arg(1) not in view.analysis.seeds:
        raise view.fail("takes a permutation of rows that does not enter the graph as it is")
    return Rows(0)
