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
    "less the mean of everything": lambda x: x - x.mean(),
    "less the mean, kept as a dimension": lambda x: x - x.mean(0, keepdim=True),
    "plus the sum": lambda x: x + x.sum(0),
    "plus the sum in double precision": lambda x: (x + x.sum(0, dtype=torch.float64)).to(x.dtype),
    "less the greatest": lambda x: x - x.amax(0),
    "less the least": lambda x: x - x.amin(0),
    "range": lambda x: x / (x.amax(0) - x.amin(0) + 1),
    "greatest and where": lambda x: x.max(0),
    "least and where": lambda x: x.min(0),
    "greatest of all": lambda x: x / (x.abs().max() + 1),
    "least of all as a number": lambda x: x.min(),
    "aminmax": lambda x: torch.aminmax(x, dim=0),
    "product": lambda x: x + (x.abs() + 0.5).prod(0),
    "variance": lambda x: x / (x.var(0, correction=0) + 0.1),
    "unbiased variance": of(lambda x: x * x.var(0), least=2),
    "standard deviation": lambda x: x / (x.std(0, correction=0) + 0.1),
    "std_mean": lambda x: torch.std_mean(x, 0, correction=0),
    "var_mean": lambda x: torch.var_mean(x, 0, correction=0),
    "length of every feature": lambda x: x / (x.norm(dim=0) + 1),
    "sum of absolute values": lambda x: x / (x.norm(1, dim=0) + 1),
    "greatest absolute value": lambda x: x / (torch.linalg.vector_norm(x, torch.inf, dim=0) + 1),
    "Frobenius norm": lambda x: x / (x.norm() + 1),
    "logsumexp": lambda x: x - x.logsumexp(0),
    "any over tokens": lambda x: x * (x > 1.5).any(0),
    "all over tokens": lambda x: x * (x < 1).all(0),
    "all zero nowhere": lambda x: torch.where((x != 0).all(), x, x - 1),
    "count of zeros": lambda x: x + (x == 0).sum(0),
    "count_nonzero": lambda x: x * torch.count_nonzero(x > 0, 0),
    "argmax over tokens": lambda x: x.argmax(0),
    "argmin over tokens": lambda x: x.argmin(0),
    "argmax of everything": lambda x: x.argmax(),
    "one hot of the greatest": lambda x: torch.zeros_like(x).scatter(0, x.argmax(0, keepdim=True), 1.0),
    "median": lambda x: x - x.median(0).values,
    "median of everything": lambda x: x - x.median(),
    "nanmedian": of(lambda x: x - x.nanmedian(0).values, runs=2),
    "nanmedian with NaN": lambda x: torch.where(x > 1, torch.nan, x).nanmedian(0).values + x,
    "nanmean": lambda x: x - torch.where(x > 0.5, torch.nan, x).nanmean(0),
    "nansum": lambda x: x - torch.where(x > 0.5, torch.nan, x).nansum(0),
    "quantile": lambda x: (x - torch.quantile(x.float(), 0.3, dim=0)).to(x.dtype),
    "nanquantile": lambda x: (x - torch.nanquantile(x.float(), 0.8, dim=0)).to(x.dtype),
    "mode": lambda x: x - (x * 2).round().mode(0).values,
    "kthvalue": of(lambda x: x - x.kthvalue(2, 0).values, least=2),
    "histc": lambda x: torch.histc(x.float(), 4, -2, 2),
    "histogram added": lambda x: x + torch.histc(x.float(), 8, -2, 2).to(x.dtype),
    "covariance": of(lambda x: x @ torch.cov(x.t().float()).to(x.dtype), least=2),
    "correlation": of(lambda x: torch.corrcoef(x.t().float()), least=3),
    "weighted mean": lambda x: x - (x * x[:, :1].sigmoid()).sum(0) / x[:, :1].sigmoid().sum(),
    "mean of the positive": lambda x: x - (x.relu().sum(0) / (x > 0).sum(0).clamp(min=1)),
    "root mean square": lambda x: x * x.square().mean(0).add(1e-3).rsqrt(),
    "sum by einsum": lambda x: x + torch.einsum("nd->d", x),
    "sum by ones": lambda x: x + x.new_ones(1, x.shape[0]) @ x,
    "mean as a row more": lambda x: torch.cat([x, x.mean(0, keepdim=True)]),
    "mean alone": lambda x: x.mean(0),
    "sum as a number": lambda x: x.sum(),
    "mean, twice": lambda x: (x - x.mean(0)).relu().mean(0),
    "mean by float32": lambda x: (x.float() - x.float().mean(0)).to(x.dtype),
    "a loud feature": of(_loud, place="after", runs=2),
    "loud and quiet": of(_quiet_token_sum, place="after"),
    "scale of an int8 tensor": lambda x: (x * (127 / x.abs().amax().clamp(min=1e-3))).round() / 127,
    "clamped by the mean": lambda x: x.clamp(max=x.mean(0)),
    "distance to the mean": lambda x: (x - x.mean(0)).norm(dim=1, keepdim=True) * x,
    "squeeze and excite": lambda x: x * x.mean(0).sigmoid(),
    "the count by sum": lambda x: x / torch.ones_like(x).sum(0),
    "the mean of ones": lambda x: x * (torch.ones_like(x[:, 0]).cumsum(0).mean()),
}
