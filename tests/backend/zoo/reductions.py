"""Statistics of all tokens that reach each of them, or are the result."""

from __future__ import annotations

import torch
from torch import Tensor

from .entries import of


def _loud(x: Tensor) -> Tensor:
    """One feature a million times larger than the others, which lose their mean."""
    return torch.cat([x[:, :1] * 1e6, x[:, 1:] - x[:, 1:].mean(0)], 1)


def _quiet_token_sum(x: Tensor) -> Tensor:
    gains = torch.tensor([1e6, 1, 1, 1, 1, 1, 1, 1e-6], dtype=x.dtype)
    return x * gains + x.sum(0) * gains.flip(0).minimum(gains)


REDUCTIONS = {
    "less the mean": lambda x: x - x.mean(0),
    "plus the sum": lambda x: x + x.sum(0),
    "plus the sum in double precision": lambda x: (x + x.sum(0, dtype=torch.float64)).to(x.dtype),
    "less the greatest": lambda x: x - x.amax(0),
    "greatest and where": lambda x: x.max(0),
    "greatest of all": lambda x: x / (x.abs().max() + 1),
    "aminmax": lambda x: torch.aminmax(x, dim=0),
    "product": lambda x: x + (x.abs() + 0.5).prod(0),
    "variance": lambda x: x / (x.var(0, correction=0) + 0.1),
    "var_mean": lambda x: torch.var_mean(x, 0, correction=0),
    "length of every feature": lambda x: x / (x.norm(dim=0) + 1),
    "greatest absolute value": lambda x: x / (torch.linalg.vector_norm(x, torch.inf, dim=0) + 1),
    "Frobenius norm": lambda x: x / (x.norm() + 1),
    "logsumexp": lambda x: x - x.logsumexp(0),
    "any over tokens": lambda x: x * (x > 1.5).any(0),
    "all over tokens": lambda x: x * (x < 1).all(0),
    "count_nonzero": lambda x: x * torch.count_nonzero(x > 0, 0),
    "argmax over tokens": lambda x: x.argmax(0),
    "argmax of everything": lambda x: x.argmax(),
    "one hot of the greatest": lambda x: torch.zeros_like(x).scatter(0, x.argmax(0, keepdim=True), 1.0),
    "median": lambda x: x - x.median(0).values,
    "nanmedian": of(lambda x: x - x.nanmedian(0).values, runs=2),
    "nanmedian with NaN": lambda x: torch.where(x > 1, torch.nan, x).nanmedian(0).values + x,
    "nanmean": lambda x: x - torch.where(x > 0.5, torch.nan, x).nanmean(0),
    "quantile": lambda x: (x - torch.quantile(x.float(), 0.3, dim=0)).to(x.dtype),
    "mode": lambda x: x - (x * 2).round().mode(0).values,
    "kthvalue": of(lambda x: x - x.kthvalue(2, 0).values, least=2),
    "histc": lambda x: torch.histc(x.float(), 4, -2, 2),
    "covariance": of(lambda x: x @ torch.cov(x.t().float()).to(x.dtype), least=2),
    "correlation": of(lambda x: torch.corrcoef(x.t().float()), least=3),
    "mean of the positive": lambda x: x - (x.relu().sum(0) / (x > 0).sum(0).clamp(min=1)),
    "sum by einsum": lambda x: x + torch.einsum("nd->d", x),
    "sum by ones": lambda x: x + x.new_ones(1, x.shape[0]) @ x,
    "mean as a row more": lambda x: torch.cat([x, x.mean(0, keepdim=True)]),
    "mean alone": lambda x: x.mean(0),
    "a loud feature": of(_loud, place="after", runs=2),
    "loud and quiet": of(_quiet_token_sum, place="after"),
    "scale of an int8 tensor": lambda x: (x * (127 / x.abs().amax().clamp(min=1e-3))).round() / 127,
    "the count by sum": lambda x: x / torch.ones_like(x).sum(0),
}
