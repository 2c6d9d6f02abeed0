"""Lookups by indices that are an input or computed from one, in tables shared or not; and attention."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import fxsplit_encoder.kernels.attention  # noqa: F401  (registers the ops)
from fxsplit_encoder.compile import rewriting  # noqa: F401  (registers its op)
from fxsplit_encoder.compile.padding.rules import DENSE_ATTENTIONS

from ..builder import Builder
from ..inputs import NUM_IDS
from .registry import call_of

aten = torch.ops.aten


def indices(b: Builder) -> fx.Node:
    """Integers in range for a table of NUM_IDS rows, at least those of real rows."""
    ids = b.integers()
    for _ in range(b.choice((0, 0, 1, 2))):
        ids = b.choice((_computed, _moved, _moved))(b, ids) or ids
    return ids


def _computed(b: Builder, ids: fx.Node) -> fx.Node | None:
    """In range for real rows, which are at least 1, but not for the zeros of pad rows."""
    shifted = [(aten.sub.Tensor, 1), (aten.rsub.Scalar, NUM_IDS), (aten.add.Scalar, -1)]
    target, number = b.choice(shifted)
    return b.call(target, ids, number)


def _moved(b: Builder, ids: fx.Node) -> fx.Node | None:
    other = b.call(aten.sub.Tensor, ids, 1) if b.chance(0.3) else ids
    tensors = [ids, other or ids]
    rank = ids.meta["val"].dim()
    moves = [
        lambda: b.call(aten.unsqueeze.default, ids, b.dim(ids, 0.5, extra=1)),
        lambda: b.call(aten.view.default, ids, [-1]),
        lambda: b.call(aten.view.default, ids, [-1, 2]),
        lambda: b.call(aten.stack.default, tensors, b.dim(ids, 0.8, extra=1)),
        lambda: b.call(aten.cat.default, tensors, b.dim(ids)),
        lambda: b.call(aten.clone.default, ids),
        lambda: b.call(aten._to_copy.default, ids, dtype=b.choice((torch.int64, torch.int32))),
        lambda: b.call(aten.select.int, ids, b.dim(ids), 0) if rank > 1 else None,
        lambda: b.call(aten.expand.default, ids, [2, *b.sizes(ids)]),
        lambda: b.call(aten.constant_pad_nd.default, ids, b.choice(([1, 0], [0, 1])), 1),
        lambda: b.call(aten.slice.Tensor, ids, b.dim(ids), 0, 1),
    ]
    return b.choice(moves)()


def _table(b: Builder, rank: int) -> fx.Node:
    if b.chance(0.1):
        return b.floats(rank)
    return b.shared([NUM_IDS] + [b.choice((1, 3, NUM_IDS)) for _ in range(rank - 1)])


@call_of("embedding")
def _embedding(b: Builder, name: str) -> fx.Node | None:
    return b.call(aten.embedding.default, _table(b, 2), indices(b), *([0] if b.chance(0.2) else []))


@call_of("index", "_unsafe_index")
def _index(b: Builder, name: str) -> fx.Node | None:
    if b.chance(0.4):
        return _entries_of_rows(b, name)
    kinds: list[list[str]] = [["i"], ["i"], ["i", "i"], ["i", "-", "i"], ["-", "i"], ["i", "s"], ["m"]]
    kind = b.choice(kinds)
    made = {"i": lambda: indices(b), "-": lambda: None, "s": lambda: _shared_ids(b), "m": lambda: _mask(b)}
    given = [made[letter]() for letter in kind]
    rank = max(len(kind), b.choice((1, 2, 3)))
    table = b.shared([NUM_IDS] * rank) if b.chance(0.85) else b.floats()
    return b.call(getattr(aten, name).Tensor, table, given)


def _entries_of_rows(b: Builder, name: str) -> fx.Node | None:
    """Shared indices in some of the dimensions of rows, or of one row with its neighbours."""
    rank = b.choice((2, 3, 4))
    x = b.rows([NUM_IDS if rank < 4 else 3] * rank, b.random.randrange(rank))
    tokens = b.token_dims(x)
    given = []
    for dim in range(b.random.randint(1, rank)):
        kept = b.chance(0.9) if dim in tokens else b.chance(0.3)
        given.append(None if kept else _shared_ids(b, x.meta["val"].shape[dim]))
    return b.call(getattr(aten, name).Tensor, x, given) if any(i is not None for i in given) else None


def _shared_ids(b: Builder, size: Any = NUM_IDS) -> fx.Node:
    ids = b.shared(b.choice(([1], [], [2, 1], [3])), torch.int64)
    return ids if size == NUM_IDS else b.call(aten.remainder.Scalar, ids, 3) or ids


def _mask(b: Builder) -> fx.Node:
    return b.pick(lambda v: v.dtype == torch.bool) or b.rows([0], 0, torch.bool)


@call_of("index_select")
def _index_select(b: Builder, name: str) -> fx.Node | None:
    if b.chance(0.4):
        x = b.rows([NUM_IDS] * 3, b.random.randrange(3))
        return b.call(aten.index_select.default, x, b.dim(x), b.shared([2], torch.int64))
    table = _table(b, b.choice((1, 2, 3)))
    return b.call(aten.index_select.default, table, b.choice((0, 0, 0, -1)), indices(b))


@call_of("fxsplit::permute_rows")
def _permute_rows(b: Builder, name: str) -> fx.Node | None:
    permutation = b.permutation()
    if b.chance(0.15):
        permutation = b.call(aten.flip.default, permutation, [0]) or permutation
    rows = b.floats()
    if b.chance(0.6):
        rows = b.token_rows([3])
    return b.call(torch.ops.fxsplit.permute_rows.default, rows, permutation)


@call_of("varlen_attention")
def _packed(b: Builder, name: str) -> fx.Node | None:
    q = b.floats(rank=3) if b.chance(0.2) else b.token_rows([2, 3])
    k, v = q, b.call(aten.tanh.default, q) or q
    longest = b.size(q, 0) if b.chance(0.7) else b.count()
    scale: Any = 0.5 if b.chance(0.95) else b.number(operator.truediv, 1, b.count())
    segments = b.segments() if b.chance(0.95) else b.integers()
    return b.call(torch.ops.fxsplit.varlen_attention.default, q, k, v, segments, longest, scale)


@call_of(*DENSE_ATTENTIONS)
def _dense(b: Builder, name: str) -> fx.Node | None:
    q = _query(b)
    k, v = (b.call(aten.tanh.default, q) or q if b.flag() else q for _ in range(2))
    if name == "dense_attention":
        return b.call(torch.ops.fxsplit.dense_attention.default, q, k, v, 0.5)
    bias = _bias(b, q) if b.chance(0.3) else None
    target = getattr(aten, name).default
    if name == "scaled_dot_product_attention":
        arguments: tuple[Any, ...] = (bias, 0.0, bias is None and b.chance(0.3))
    elif name == "_scaled_dot_product_flash_attention_for_cpu":
        keywords = {} if bias is None else {"attn_mask": bias}
        return b.call(target, q, k, v, 0.0, False, **keywords)
    elif name == "_scaled_dot_product_flash_attention":
        arguments = (0.0, False)
    elif name == "_scaled_dot_product_cudnn_attention":
        arguments = (bias, True)
    else:
        arguments = (bias, *([True] if "efficient" in name else []))
    return b.call(target, q, k, v, *arguments)


def _query(b: Builder) -> fx.Node:
    """(batch, heads, tokens, head_dim), tokens of the graph being its batch, most often."""
    if b.chance(0.3):
        return b.floats(rank=b.choice((3, 4)))
    return b.rows([0, 2, 3, 4], 0) if b.chance(0.75) else b.rows([2, 2, 0, 4], b.choice((1, 2)))


def _bias(b: Builder, q: fx.Node) -> fx.Node:
    """What is added to the logits."""
    shape = q.meta["val"].shape
    tokens = shape[-2]
    if isinstance(tokens, int) and b.chance(0.7):
        if b.chance(0.5):
            return b.shared([1, 1, tokens, tokens])
        sizes = [b.size(q, 0), 1, tokens, tokens]
        ones = b.shared([1, 1, 1, 1])
        return b.call(aten.expand.default, ones, sizes) or ones
    return b.floats(rank=4)
