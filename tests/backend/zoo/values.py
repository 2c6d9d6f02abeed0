"""What the values of the tokens decide: graph breaks, and branches that the first call may not take."""

from __future__ import annotations

import torch
from torch import Tensor

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


def _clipped_at_deviations(x: Tensor) -> Tensor:
    limit = 2 * x.std(0, correction=0)
    return x.clamp(-limit, limit)


VALUES = {
    "flagged mean": _flagged,
    "flagged mean, warmed with the flag off": of(_flagged, warmup="zeros", runs=2),
    "scale times the mean": of(lambda x, scale: x + scale * x.mean(0), warmup="zeros"),
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
    "mean in place of NaN": lambda x: torch.where(x > 1.5, x.mean(0), x),
    "mean of zero features": of(
        lambda x: torch.where((x == 0).all(0), x + 1, x - x.mean(0)), warmup="zeros none"
    ),
    "tiny share of the mean": lambda x: x + 1e-2 * x.mean(0),
    "share of the sum, in one feature": lambda x: torch.cat([x[:, :7], x[:, 7:] + x[:, 7:].sum(0)], 1),
    "NaN spread": lambda x: x + 0 * torch.where(x.sum() > 2, torch.nan, 0.0),
    "as a list": lambda x: x * len(x[:, 0].tolist()),
}
