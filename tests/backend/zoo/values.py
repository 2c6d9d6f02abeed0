"""What the values of tokens, and of integers and truth values beside them, decide: data, sizes, branches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .entries import of


def _flagged(x: Tensor, flag: Tensor) -> Tensor:
    return torch.where(flag, x - x.mean(0), x)


def _branch_on_the_sum(x: Tensor) -> Tensor:
    return x - x.mean(0) if x.sum() > 0 else x + 1


def _branch_on_a_flag(x: Tensor, flag: Tensor) -> Tensor:
    return x - x.mean(0) if flag else x


def _times_an_item(x: Tensor) -> Tensor:
    return x * x.sum().item()


def _broken(x: Tensor) -> Tensor:
    y = x - x.mean(0)
    torch._dynamo.graph_break()
    return y * 2


def _until_small(x: Tensor) -> Tensor:
    while x.abs().sum() > 20:
        x = x / 2
    return x


def _first_rows(x: Tensor) -> Tensor:
    return x[: int((x[:, 0] > 0).sum())]


def _mean_if_any(x: Tensor) -> Tensor:
    """Only an outlier brings the mean in."""
    return torch.where((x > 1.5).any(), x - x.mean(0), x)


def _pooled(x: Tensor, ids: Tensor) -> Tensor:
    """Means of the tokens that share an id."""
    sums = x.new_zeros(4, 8).index_add(0, ids, x)
    return sums / x.new_zeros(4).index_add(0, ids, x.new_ones(x.shape[0])).clamp(min=1)[:, None]


def _filled_by_a_token(x: Tensor, keep: Tensor) -> Tensor:
    """A mask token in place of some, as in pretraining: the rows stay apart but for the count of them."""
    return torch.where(keep[:, None], x, x.new_ones(8)) * keep.sum()


def _place_among_the_kept(x: Tensor, keep: Tensor) -> Tensor:
    return x + (keep.long().cumsum(0) - 1)[:, None].to(x.dtype)


VALUES = {
    "flagged mean, warmed with the flag off": of(_flagged, warmup="zeros", runs=2),
    "weight of what is hidden": of(lambda x, scale: torch.lerp(x, x.mean(0), scale), warmup="zeros"),
    "threshold between tokens": of(lambda x, scale: x * (x.amax(0) > 1 + scale), warmup="ones zeros"),
    "branch on the sum": _branch_on_the_sum,
    "branch on a flag": _branch_on_a_flag,
    "times an item": _times_an_item,
    "graph break": _broken,
    "halved until small": _until_small,
    "first rows by a count": _first_rows,
    "rows that are positive": lambda x: x[x[:, 0] > 0],
    "mean if any": _mean_if_any,
    "mean of zero features": of(
        lambda x: torch.where((x == 0).all(0), x + 1, x - x.mean(0)), warmup="zeros none"
    ),
    "tiny share of the mean": lambda x: x + 1e-2 * x.mean(0),
    "as a list": lambda x: x * len(x[:, 0].tolist()),
    "positions less their least, warmed": of(
        lambda x, positions: x + (positions - positions.min())[:, None].to(x.dtype),
        warmup="zeros ones",
        runs=2,
    ),
    "positions less their least, looked up": of(
        lambda x, positions: x + torch.eye(50, 8, dtype=x.dtype)[positions - positions.amin()]
    ),
    "any id is 0": of(lambda x, ids: x * (ids == 0).any(0), runs=2),
    "any id is 0, else the flip": lambda x, ids: torch.where((ids == 0).any(0), x, x.flip(0)),
    "least position alone": of(lambda x, positions: (x * 2, positions.min()), least=1),
    "share of an id": lambda x, ids: x * ids.bincount(minlength=4)[ids][:, None].to(x.dtype),
    "one hot pooling": lambda x, ids: F.one_hot(ids, 4).to(x.dtype).t() @ x,
    "tokens sorted by id": lambda x, ids: x[ids.argsort(stable=True)],
    "unique ids": lambda x, ids: (x, ids.unique()),
    "where ids change": lambda x, ids: x * F.pad(ids.diff() != 0, (1, 0), value=True)[:, None],
    "ids less the count": lambda x, ids: (x, ids - x.shape[0]),
    "pooled by id and given back": lambda x, ids: x - _pooled(x, ids)[ids],
    "index_copy": lambda x, order: torch.zeros_like(x).index_copy(0, order, x),
    "gathered rows": lambda x, order: x.gather(0, order[:, None].expand(-1, 8)),
    "rows by id": of(lambda x, ids: x[ids], least=4),
    "rows where kept": lambda x, keep: x[keep],
    "nonzero": lambda x, keep: (x, keep.nonzero()),
    "mask token and count": _filled_by_a_token,
    "place among the kept": _place_among_the_kept,
    "none dropped, as a result": lambda x, keep: (x + 1, keep.all()),
    "attention to the kept": lambda x, keep: (x @ x.t()).masked_fill(~keep, -1e4).softmax(-1) @ x,
    "parity of the kept": lambda x, keep: x * (1 - 2 * (keep.sum() % 2)).to(x.dtype),
}
