"""Rows that choose what they read: by an index, or by attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.padding.states import (
    SEGMENTS,
    SHARED,
    Mixed,
    NodeView,
    Rows,
    State,
    named,
    rule,
)
from fxsplit_encoder.compile.sizes import shape_exprs

DENSE_ATTENTIONS = (
    "dense_attention",
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
ATTENTIONS = frozenset(("varlen_attention", *DENSE_ATTENTIONS))

_PERMUTE_ROWS = "fxsplit::permute_rows"


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
        raise view.fail("selects by a mask, so that the number of entries depends on data")
    if view.state(view.arg(0)) is not SHARED:
        return _entries_of_rows(view, indices, given)
    if indices[0] is None or any(not isinstance(view.state(i), Rows) for i in given):
        raise view.fail("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    rank = max(i.meta["val"].dim() for i in given)
    rows = {view.state(i).at(view.state(i).dim + rank - i.meta["val"].dim()) for i in given}
    if len(rows) != 1:
        raise view.fail("gathers with a pattern that is not one lookup a row")
    return rows.pop()


def _entries_of_rows(view: NodeView, indices: list[Any], given: list[Any]) -> State:
    """Rows whose other dimensions are indexed. What several indices give takes the place of the first if they
    stand side by side, else it comes first.
    """
    rows = view.rows()
    if rows < len(indices) and indices[rows] is not None:
        raise view.fail("gathers tokens")
    if any(view.state(i) is not SHARED for i in given):
        raise view.fail("gathers entries of every row by indices of its own")
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
        raise view.fail("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    return Rows(view.rows(2))


@rule(_PERMUTE_ROWS)
def _permute_rows(view: NodeView) -> State:
    """permute_rows(rows, permutation): it permutes the real rows among themselves, for that is what the op
    promises of a permutation that enters the graph as it is: padding only appends to such a one.
    """
    if view.rows(0) != 0 or view.rows(1) != 0 or view.arg(1) not in view.analysis.seeds:
        raise view.fail("takes a permutation of rows that does not enter the graph as it is")
    return Rows(0)


@rule("varlen_attention")
def _varlen_attention(view: NodeView) -> State:
    """varlen_attention(query, key, value, cu_seqlens, max_seqlen, scale): a row attends to the rows of its
    own segment. The segments of the unpadded run are there in the padded one, hold real rows only, and are
    followed by empty ones; so a real row reads the same rows, whatever the bound on the longest segment.
    """
    if [view.state(view.arg(i)) for i in range(3)] != [Rows(0)] * 3:
        raise view.fail("takes query, key and value whose tokens are not their first dimension")
    if view.state(view.arg(3)) is not SEGMENTS:
        raise view.fail("takes cumulative lengths that do not enter the graph as they are")
    tokens = shape_exprs(view.tensor())[0]
    if not view.analysis.sizes.count_tokens(tokens):
        # Pad rows belong to no segment, and masks keep only the tokens' finite.
        raise view.fail(
            f"runs over {tokens} rows, which is not the token count {view.analysis.sizes.token_symbol}"
        )
    if isinstance(view.arg(5), fx.Node):
        raise view.fail("takes a computed scale")
    return Rows(0)


@rule(*DENSE_ATTENTIONS)
def _dense_attention(view: NodeView) -> State:
    """(batch, heads, tokens, head_dim): entry b of the result is computed from entry b of query, key, value
    and mask, so with the tokens of the graph as the batch its first entries come from real ones alone. A mask
    without a batch, or with a batch of one, is the same for all. Of further results, those that have an entry
    for each of the batch are such entries too; of others (seeds, offsets) nothing is known.
    """
    if named(view.node, "dropout_p"):
        raise view.fail("drops entries at random")
    qkv, others = view.args[:3], [*view.args[3:], *view.node.kwargs.values()]
    masks = [a for a in others if isinstance(a, fx.Node)]
    state = view.state(qkv[0])
    batches_tokens = isinstance(state, Rows) and state.dim == 0
    if not batches_tokens or any(view.state(a) != state or view.rank(i) < 3 for i, a in enumerate(qkv)):
        raise view.fail("attends across the dimension that counts tokens")
    for mask in masks:
        aligned = view.state(mask) == state and mask.meta["val"].dim() == view.rank()
        if not aligned and view.state(mask) is not SHARED:
            raise view.fail("attends across the dimension that counts tokens")
    results: Any = view.node.meta["val"]
    if isinstance(results, torch.Tensor):
        return state
    return [_result_state(view, state, result) for result in results]


def _result_state(view: NodeView, state: Rows, result: Any) -> State:
    counts_rows = isinstance(result, torch.Tensor) and result.dim() > 0
    if counts_rows and view.analysis.sizes.counts_rows(shape_exprs(result)[0]):
        return state
    return Mixed(f"{view.name} gives nothing that is known beside what was attended to")
