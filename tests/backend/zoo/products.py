"""Tokens times tokens: linear attention, distances, masks, transforms, attention of other kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import made, of
from .norms import Through


def _band(x: Tensor) -> Tensor:
    """Attention to tokens at most two away."""
    rows = torch.arange(x.shape[0])
    far = (rows[:, None] - rows).abs() > 2
    return (x @ x.t()).masked_fill(far, -1e4).softmax(-1) @ x


def _causal_mask(x: Tensor) -> Tensor:
    n = x.shape[0]
    mask = torch.full((n, n), -1e4, dtype=x.dtype).triu(1)
    return (x @ x.t() + mask).softmax(-1) @ x


def _alibi(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], dtype=x.dtype)
    return (x @ x.t() - 0.1 * (rows[:, None] - rows).abs()).softmax(-1) @ x


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


def _slots(x: Tensor) -> Tensor:
    """Slot attention's pooling: shares over slots, means over tokens."""
    shares = (x @ torch.eye(8, 4, dtype=x.dtype)).softmax(-1)
    return (shares / (shares.sum(0) + 0.1)).t() @ x


def _self_attention(**options: object) -> Through:
    return Through(
        nn.MultiheadAttention(8, 2, batch_first=True, **options),
        lambda module, x: x + module(x[None], x[None], x[None], need_weights=False)[0][0],
    )


def _recurrent(inner: nn.Module) -> Through:
    return Through(inner, lambda module, x: module(x[None])[0][0])


def _sdpa(x: Tensor, **options: object) -> Tensor:
    q = x.view(1, -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, **options).transpose(1, 2).reshape(-1, 8)


PRODUCTS = {
    "linear attention": lambda x: x @ (x.t() @ x),
    "linear attention, normalized": _linear_attention,
    "causal linear attention": lambda x: torch.einsum(
        "nd,nde->ne", x, (x[:, :, None] * x[:, None]).cumsum(0)
    ),
    "Gram matrix": lambda x: x @ x.t(),
    "einsum across tokens": lambda x: torch.einsum("nd,md->nm", x, x),
    "einsum through all": lambda x: torch.einsum("nd,md,me->ne", x, x, x),
    "tensordot over tokens": lambda x: torch.tensordot(x, x, ([0], [0])),
    "soft attention": lambda x: (x @ x.t()).softmax(-1) @ x,
    "attention over tokens as an op": lambda x: _sdpa(x),
    "causal attention as an op": lambda x: _sdpa(x, is_causal=True),
    "attention with a mask of the count": lambda x: _sdpa(
        x, attn_mask=torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu()
    ),
    "multi-head attention": made(lambda: _self_attention()),
    "multi-head attention with a zero token": made(lambda: _self_attention(add_zero_attn=True)),
    "pooling by queries": made(
        lambda: Through(
            nn.Linear(8, 3, bias=False), lambda queries, x: (queries.weight @ x.t()).softmax(-1) @ x
        ),
        least=1,
    ),
    "slots": _slots,
    "cdist": lambda x: torch.cdist(x.float(), x.float()),
    "squared distances": lambda x: (x[:, None] - x).square().sum(-1),
    "cosine similarities": lambda x: F.cosine_similarity(x[:, None], x[None], dim=-1),
    "nearest tokens": of(_nearest, least=3),
    "causal mask": _causal_mask,
    "causal mean": lambda x: torch.ones(x.shape[0], x.shape[0], dtype=x.dtype).tril() @ x,
    "band": _band,
    "ALiBi": _alibi,
    "relative positions": _relative_positions,
    "mask returned": lambda x: (x * 2, torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()),
    "outer product": lambda x: torch.outer(x[:, 0], x[:, 1]),
    "diagonal of the Gram matrix": lambda x: (x @ x.t()).diagonal(),
    "FFT": lambda x: torch.fft.fft(x.float(), dim=0),
    "real FFT": of(lambda x: torch.fft.rfft(x.float(), dim=0), least=1),
    "FNet": of(lambda x: torch.fft.fft2(x.float()).real.to(x.dtype), least=1),
    "low pass": of(
        lambda x: torch.fft.ifft(torch.fft.fft(x.float(), dim=0)[:2], n=x.shape[0], dim=0).real.to(x.dtype),
        least=2,
    ),
    "fftshift": lambda x: torch.fft.fftshift(x, 0),
    "QR": of(lambda x: torch.linalg.qr(x.float()).R.abs(), least=8),
    "ridge regression": lambda x: torch.linalg.solve((x.t() @ x).float() + torch.eye(8), x.t().float()),
    "GRU": made(lambda: _recurrent(nn.GRU(8, 8, batch_first=True)), least=1),
    "LSTM, both ways": made(lambda: _recurrent(nn.LSTM(8, 4, batch_first=True, bidirectional=True)), least=1),
    "addmm of tokens": lambda x: torch.addmm(x[:8].t() @ x[:8], x.t(), x),
    "loss of contrast": of(lambda x: F.cross_entropy(x @ x.t(), torch.arange(x.shape[0])), least=1),
}
