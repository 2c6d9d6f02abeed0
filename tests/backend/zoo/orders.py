"""Scans, sorts and reorderings along the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .entries import of


def _ranks(x: Tensor) -> Tensor:
    return torch.argsort(torch.argsort(x, dim=0, stable=True), dim=0)


def _keep_top_half(x: Tensor) -> Tensor:
    kept = x.norm(dim=1).topk(x.shape[0] // 2).indices.sort().values
    return x[kept]


def _merge_most_alike(x: Tensor) -> Tensor:
    """ToMe: every token of the one half goes to the most alike one of the other."""
    a, b = x[::2], x[1::2]
    nearest = (a @ b.t()).argmax(1)
    return b.index_add(0, nearest, a)


ORDERS = {
    "cumsum": lambda x: x.cumsum(0),
    "cumsum from the end": lambda x: x.flip(0).cumsum(0).flip(0),
    "running mean": lambda x: (
        x.cumsum(0) / torch.arange(1, x.shape[0] + 1, device=x.device)[:, None].to(x.dtype)
    ),
    "cumprod": lambda x: (1 + x / 10).cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: x.cummax(0).values,
    "cummax from the end": lambda x: x.flip(0).cummax(0).values.flip(0),
    "cummin": lambda x: x.cummin(0),
    "diff": lambda x: x.diff(dim=0),
    "cumulative trapezoid": lambda x: torch.cumulative_trapezoid(x, dim=0),
    "sort": of(lambda x: x.sort(0).values, warmup="zeros", runs=2),
    "sort downwards": lambda x: x.sort(0, descending=True).values,
    "sort in place of rows": lambda x: x[x[:, 0].argsort()],
    "argsort": lambda x: torch.argsort(x, dim=0, stable=True),
    "msort": lambda x: torch.msort(x),
    "topk": of(lambda x: x.topk(2, 0).values, least=2),
    "topk of all tokens": lambda x: x.topk(x.shape[0], 0).values,
    "the larger half": _keep_top_half,
    "tokens merged": of(_merge_most_alike, least=2),
    "flip": lambda x: x.flip(0),
    "rot90": lambda x: torch.rot90(x, 2),
    "roll": lambda x: x.roll(1, 0),
    "roll of everything": lambda x: x.roll(1),
    "roll by half of the tokens": lambda x: x.roll(x.shape[0] // 2, 0),
    "reversed by index": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1, device=x.device)],
    "searchsorted": lambda x: torch.searchsorted(x[:, 0].sort().values, x[:, 1].contiguous()),
    "bucketize": lambda x: torch.bucketize(x, x[:, 0].sort().values),
    "unique": lambda x: (x[:, 0] * 2).round().unique(),
    "unique and counts": lambda x: (x[:, 0] * 2).round().unique(return_counts=True),
    "unique_consecutive": lambda x: (x[:, 0] > 0).unique_consecutive(),
    "isin": lambda x: x * torch.isin((x * 4).round(), (x[:, :1] * 4).round()),
    "gathered by argsort": lambda x: x.gather(0, _ranks(x)),
    "pairs exchanged": of(lambda x: x.view(-1, 2, 8).flip(1).reshape(-1, 8), step=2),
    "transposed": lambda x: x.t(),
    "flattened": lambda x: x.reshape(-1) + x.reshape(-1).flip(0),
}
