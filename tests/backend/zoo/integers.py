"""Integers and truth values, one a token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .entries import of


def _pooled(x: Tensor, ids: Tensor) -> Tensor:
    """Means of the tokens that share an id."""
    sums = x.new_zeros(4, 8).index_add(0, ids, x)
    return sums / x.new_zeros(4).index_add(0, ids, x.new_ones(x.shape[0])).clamp(min=1)[:, None]


def _scattered_mean(x: Tensor, ids: Tensor) -> Tensor:
    index = ids[:, None].expand(-1, 8)
    return x.new_zeros(4, 8).scatter_reduce(0, index, x, "mean", include_self=False)


def _same_id(x: Tensor, ids: Tensor) -> Tensor:
    other = ids[:, None] != ids
    return (x @ x.t()).masked_fill(other, -1e4).softmax(-1) @ x


def _kept_first(x: Tensor, keep: Tensor) -> Tensor:
    return x[(~keep).long().argsort(stable=True)]


def _kept_mean(x: Tensor, keep: Tensor) -> Tensor:
    weight = keep[:, None].to(x.dtype)
    return x - (x * weight).sum(0) / weight.sum().clamp(min=1)


def _kept_softmax(x: Tensor, keep: Tensor) -> Tensor:
    return x.masked_fill(~keep[:, None], -1e4).softmax(0)


def _filled_by_the_mean(x: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep[:, None], x, x.mean(0))


def _filled_by_a_token(x: Tensor, keep: Tensor) -> Tensor:
    """A mask token in place of some, as in pretraining: the rows stay apart but for the count of them."""
    return torch.where(keep[:, None], x, x.new_ones(8)) * keep.sum()


def _place_among_the_kept(x: Tensor, keep: Tensor) -> Tensor:
    return x + (keep.long().cumsum(0) - 1)[:, None].to(x.dtype)


INTEGERS = {
    "positions less their least": lambda x, positions: x + (positions - positions.min())[:, None].to(x.dtype),
    "positions less their least, warmed": of(
        lambda x, positions: x + (positions - positions.min())[:, None].to(x.dtype),
        warmup="zeros ones",
        runs=2,
    ),
    "positions less their least, looked up": of(
        lambda x, positions: x + torch.eye(50, 8, dtype=x.dtype)[positions - positions.amin()]
    ),
    "positions scaled to 16": lambda x, positions: x + (positions * 16 // (positions.max() + 1))[:, None],
    "any id is 0": of(lambda x, ids: x * (ids == 0).any(0), runs=2),
    "any id is 0, else the flip": lambda x, ids: torch.where((ids == 0).any(0), x, x.flip(0)),
    "no position of 0": lambda x, positions: torch.where((positions == 0).any(0), x - 1, x),
    "sum of ids": lambda x, ids: x + ids.sum().to(x.dtype),
    "least position alone": of(lambda x, positions: (x * 2, positions.min()), least=1),
    "argmax of positions": of(lambda x, positions: x - x[positions.argmax()], least=1),
    "bincount": lambda x, ids: (x, ids.bincount(minlength=4)),
    "share of an id": lambda x, ids: x * ids.bincount(minlength=4)[ids][:, None].to(x.dtype),
    "one hot pooling": lambda x, ids: F.one_hot(ids, 4).to(x.dtype).t() @ x,
    "ids' mode": of(lambda x, ids: x * (ids == ids.mode().values)[:, None], least=1),
    "ids sorted": lambda x, ids: (x, ids.sort().values),
    "tokens sorted by id": lambda x, ids: x[ids.argsort(stable=True)],
    "ids' cumsum from the end": lambda x, ids: x + ids.flip(0).cumsum(0).flip(0)[:, None].to(x.dtype),
    "ids' cummax": lambda x, ids: (x, ids.cummax(0).values),
    "unique ids": lambda x, ids: (x, ids.unique()),
    "where ids change": lambda x, ids: x * F.pad(ids.diff() != 0, (1, 0), value=True)[:, None],
    "same id": _same_id,
    "ids less the count": lambda x, ids: (x, ids - x.shape[0]),
    "integer mean": of(lambda x, ids: (x, ids - ids.sum() // ids.numel()), least=1),
    "pooled by id and given back": lambda x, ids: x - _pooled(x, ids)[ids],
    "scattered means": _scattered_mean,
    "scatter_add": lambda x, ids: x.new_zeros(4, 8).scatter_add(0, ids[:, None].expand(-1, 8), x),
    "index_copy": lambda x, order: torch.zeros_like(x).index_copy(0, order, x),
    "index_fill": lambda x, ids: x.index_fill(0, ids[:1], 0.0),
    "scattered rows": lambda x, order: torch.zeros_like(x).scatter(0, order[:, None].expand(-1, 8), x),
    "gathered rows": lambda x, order: x.gather(0, order[:, None].expand(-1, 8)),
    "rows by id": of(lambda x, ids: x[ids], least=4),
    "embedding of tokens": of(lambda x, ids: F.embedding(ids, x), least=4),
    "take": of(lambda x, ids: x.take(ids), least=1),
    "embedding bag": lambda x, ids: F.embedding_bag(
        ids, torch.eye(4, 8, dtype=x.dtype), ids.new_zeros(1), mode="sum"
    ),
    "rows where kept": lambda x, keep: x[keep],
    "masked_select": lambda x, keep: x.masked_select(keep[:, None]),
    "nonzero": lambda x, keep: (x, keep.nonzero()),
    "kept first": _kept_first,
    "mean of the kept": _kept_mean,
    "mean in place of the others": _filled_by_the_mean,
    "mask token and count": _filled_by_a_token,
    "place among the kept": _place_among_the_kept,
    "any kept": lambda x, keep: x * keep.any(),
    "none dropped, as a result": lambda x, keep: (x + 1, keep.all()),
    "masked_scatter": lambda x, keep: x.masked_scatter(keep[:, None], x.flip(0)),
    "xor with the next": lambda x, keep: (x, keep ^ keep.roll(1)),
    "attention to the kept": lambda x, keep: (x @ x.t()).masked_fill(~keep, -1e4).softmax(-1) @ x,
    "parity of the kept": lambda x, keep: x * (1 - 2 * (keep.sum() % 2)).to(x.dtype),
}
