"""Tokens times tokens: linear attention, distances, masks, transforms, attention of other kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import Through, made, of


def _causal_mask(x: Tensor) -> Tensor:
    n = x.shape[0]
    mask = torch.full((n, n), -1e4, dtype=x.dtype).triu(1)
    return (x @ x.t() + mask).softmax(-1) @ x


def _relative_positions(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])
    table = torch.linspace(-1, 1, 400, dtype=x.dtype)
    return (table[(rows[:, None] - rows) + 200]) @ x


def _linear_attention(x: Tensor) -> Tensor:
    q, k = F.elu(x) + 1, F.elu(x) + 1
    return (q @ (k.t() @ x)) / (q @ k.sum(0)[:, None] + 1)


def _nearest(x: Tensor) -> Tensor:
    """The mean of the nearest three, itself among them."""
    distances = (x[:, None] - x).square().sum(-1)
    return x[distances.topk(3, largest=False).indices].mean(1)


def _recurrent(inner: nn.Module) -> Through:
    return Through(inner, lambda module, x: module(x[None])[0][0])


def _sdpa(x: Tensor, **options: object) -> Tensor:
    q = x.view(1, -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, **options).transpose(1, 2).reshape(-1, 8)


PRODUCTS = {
    "linear attention, normalized": _linear_attention,
    "causal linear attention": lambda x: torch.einsum(
        "nd,nde->ne", x, (x[:, :, None] * x[:, None]).cumsum(0)
    ),
    "einsum across tokens": lambda x: torch.einsum("nd,md->nm", x, x),
    "attention over tokens as an op": lambda x: _sdpa(x),
    "attention with a mask of the count": lambda x: _sdpa(
        x, attn_mask=torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu()
    ),
    "pooling by queries": made(
        lambda: Through(
            nn.Linear(8, 3, bias=False), lambda queries, x: (queries.weight @ x.t()).softmax(-1) @ x
        ),
        least=1,
    ),
    "nearest tokens": of(_nearest, least=3),
    "causal mask": _causal_mask,
    "relative positions": _relative_positions,
    "mask returned": lambda x: (x * 2, torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()),
    "diagonal of the Gram matrix": lambda x: (x @ x.t()).diagonal(),
    "FNet": of(lambda x: torch.fft.fft2(x.float()).real.to(x.dtype), least=1),
    "low pass": of(
        lambda x: torch.fft.ifft(torch.fft.fft(x.float(), dim=0)[:2], n=x.shape[0], dim=0).real.to(x.dtype),
        least=2,
    ),
    "ridge regression": lambda x: torch.linalg.solve((x.t() @ x).float() + torch.eye(8), x.t().float()),
    "GRU": made(lambda: _recurrent(nn.GRU(8, 8, batch_first=True)), least=1),
    "loss of contrast": of(lambda x: F.cross_entropy(x @ x.t(), torch.arange(x.shape[0])), least=1),
}
