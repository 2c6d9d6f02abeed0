"""Statistics of all tokens, their order, normalizations that they make together, and random numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import along, made, of, on_rows


def _loud(x: Tensor) -> Tensor:
    """One feature a million times larger than the others, which lose their mean."""
    return torch.cat([x[:, :1] * 1e6, x[:, 1:] - x[:, 1:].mean(0)], 1)


def _keep_top_half(x: Tensor) -> Tensor:
    kept = x.norm(dim=1).topk(x.shape[0] // 2).indices.sort().values
    return x[kept]


def _merge_most_alike(x: Tensor) -> Tensor:
    """ToMe: every token of the one half goes to the most alike one of the other."""
    a, b = x[::2], x[1::2]
    nearest = (a @ b.t()).argmax(1)
    return b.index_add(0, nearest, a)


def _whitened(x: Tensor) -> Tensor:
    y = (x - x.mean(0)).float()
    return (y @ torch.linalg.cholesky(y.t() @ y / x.shape[0] + 0.1 * torch.eye(8))).to(x.dtype)


def _where_loud(x: Tensor) -> Tensor:
    """Normalizes only where the data ask for it."""
    greatest = x.abs().amax()
    return torch.where(greatest > 2, x / greatest, x)


OVER_TOKENS = {
    "less the mean": lambda x: x - x.mean(0),
    "plus the sum in double precision": lambda x: (x + x.sum(0, dtype=torch.float64)).to(x.dtype),
    "greatest and where": lambda x: x.max(0),
    "any over tokens": lambda x: x * (x > 1.5).any(0),
    "one hot of the greatest": lambda x: torch.zeros_like(x).scatter(0, x.argmax(0, keepdim=True), 1.0),
    "median": lambda x: x - x.median(0).values,
    "nanmean": lambda x: x - torch.where(x > 0.5, torch.nan, x).nanmean(0),
    "mean as a row more": lambda x: torch.cat([x, x.mean(0, keepdim=True)]),
    "mean alone": lambda x: x.mean(0),
    "a loud feature": of(_loud, place="after", runs=2),
    "the count by sum": lambda x: x / torch.ones_like(x).sum(0),
    "cumsum from the end": lambda x: x.flip(0).cumsum(0).flip(0),
    "running mean": lambda x: (
        x.cumsum(0) / torch.arange(1, x.shape[0] + 1, device=x.device)[:, None].to(x.dtype)
    ),
    "cummax": lambda x: x.cummax(0).values,
    "sort": of(lambda x: x.sort(0).values, warmup="zeros", runs=2),
    "topk of all tokens": lambda x: x.topk(x.shape[0], 0).values,
    "the larger half": _keep_top_half,
    "tokens merged": of(_merge_most_alike, least=2),
    "roll by half of the tokens": lambda x: x.roll(x.shape[0] // 2, 0),
    "reversed by index": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1, device=x.device)],
    "searchsorted": lambda x: torch.searchsorted(x[:, 0].sort().values, x[:, 1].contiguous()),
    "unique": lambda x: (x[:, 0] * 2).round().unique(),
    "pairs exchanged": of(lambda x: x.view(-1, 2, 8).flip(1).reshape(-1, 8), step=2),
    "transposed": lambda x: x.t(),
    "softmax over tokens": lambda x: x.softmax(0),
    "softmax pooling": lambda x: (x[:, :1].softmax(0) * x).sum(0),
    "layer norm over tokens": of(lambda x: F.layer_norm(x.t(), (x.shape[0],)).t(), least=2),
    "batch norm that counts": made(lambda: on_rows(nn.BatchNorm1d(8, momentum=None)), least=2),
    "group norm along tokens": made(lambda: along(nn.GroupNorm(2, 8)), least=1),
    "whitened": of(_whitened, least=1),
    "normalized where loud, warmed with zeros": of(_where_loud, warmup="zeros", runs=2),
    "dropout in training": made(lambda: on_rows(nn.Dropout(0.4))),
    "noise in eval": lambda x: x + torch.rand_like(x),
    "shuffled tokens": lambda x: x[torch.randperm(x.shape[0])],
}
