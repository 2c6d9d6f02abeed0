"""Normalizations whose statistics the tokens make together, and random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import made, of


class Through(nn.Module):
    """A module, and how tokens go through it."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


def along(inner: nn.Module) -> Through:
    """A module of (1, 8, tokens)."""
    return Through(inner, lambda module, x: module(x.t()[None])[0].t())


def on_rows(inner: nn.Module) -> Through:
    """A module of (tokens, 8)."""
    return Through(inner, lambda module, x: module(x))


def _whitened(x: Tensor) -> Tensor:
    y = (x - x.mean(0)).float()
    return (y @ torch.linalg.cholesky(y.t() @ y / x.shape[0] + 0.1 * torch.eye(8))).to(x.dtype)


def _where_loud(x: Tensor) -> Tensor:
    """Normalizes only where the data ask for it."""
    greatest = x.abs().amax()
    return torch.where(greatest > 2, x / greatest, x)


def _where_uneven(x: Tensor) -> Tensor:
    deviation = x.std(0, correction=0)
    return torch.where(deviation > 0.8, x / (deviation + 0.1), x)


NORMS = {
    "softmax over tokens": lambda x: x.softmax(0),
    "log_softmax over tokens": lambda x: x.log_softmax(0),
    "softmax of everything": lambda x: x.flatten().softmax(0).view_as(x),
    "softmax pooling": lambda x: (x[:, :1].softmax(0) * x).sum(0),
    "unit features": lambda x: F.normalize(x, dim=0),
    "layer norm over tokens": of(lambda x: F.layer_norm(x.t(), (x.shape[0],)).t(), least=2),
    "layer norm of everything": of(lambda x: F.layer_norm(x, x.shape), least=1),
    "batch statistics": of(lambda x: F.batch_norm(x, None, None, training=True), least=2),
    "batch norm in training": made(lambda: on_rows(nn.BatchNorm1d(8)), least=2),
    "batch norm that counts": made(lambda: on_rows(nn.BatchNorm1d(8, momentum=None)), least=2),
    "instance norm": made(lambda: along(nn.InstanceNorm1d(8, affine=True)), least=2),
    "group norm along tokens": made(lambda: along(nn.GroupNorm(2, 8)), least=1),
    "one group along tokens": made(lambda: along(nn.GroupNorm(1, 8)), least=1),
    "local response": lambda x: F.local_response_norm(x[None], 3)[0],
    "whitened": of(_whitened, least=1),
    "normalized where loud": of(_where_loud, runs=2),
    "normalized where loud, warmed with zeros": of(_where_loud, warmup="zeros", runs=2),
    "dropout in training": made(lambda: on_rows(nn.Dropout(0.4))),
    "alpha dropout": made(lambda: on_rows(nn.AlphaDropout(0.4))),
    "noise in eval": lambda x: x + torch.rand_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "shuffled tokens": lambda x: x[torch.randperm(x.shape[0])],
    "one random number": lambda x: x * torch.rand((), dtype=x.dtype) + x.mean(0),
    "random tokens dropped": lambda x: x * (torch.rand(x.shape[0]) > 0.3)[:, None],
    "gumbel": lambda x: F.gumbel_softmax(x, dim=0),
}
