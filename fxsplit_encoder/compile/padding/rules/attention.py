"""Attention: packed along the tokens, where segments keep rows apart, or dense, where the batch does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxsplit_encoder.compile.padding.rules.registry import DENSE_ATTENTIONS, rule
from fxsplit_encoder.compile.padding.states import SEGMENTS, SHARED, Mixed, NodeView, Rows, State, named
from fxsplit_encoder.compile.sizes import shape_exprs


@rule("varlen_attention")
def _varlen_attention(view: NodeView) -> State:
    """varlen_attention(query, key, value, cu_seqlens, max_seqlen, scale): a row attends to the rows of its
    own segment. The segments of the exact run are there in the padded one, hold real rows only, and are
    followed by empty ones; so a real row reads the same rows, whatever the bound on the longest segment.
    """
    if [view.state(view.arg(i)) for i in range(3)] != [Rows(0)] * 3:
        raise view.fail("takes query, key and value whose tokens are not their first dimension")
    if view.state(view.arg(3)) is not SEGMENTS:
        raise view.fail("takes cumulative lengths that do not enter the graph as they are")
    tokens = shape_exprs(view.tensor())[0]
    if str(tokens) != view.analysis.sizes.token_symbol:
        # Pad rows belong to no segment, and masks keep only the tokens' finite.
        view.analysis.may_probe = False
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
