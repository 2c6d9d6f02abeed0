"""Forwards whose rows are independent: padded replays must serve them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import OnRows, made, of
from .placing import attend_packed


class Block(nn.Module):
    """A transformer block of (..., tokens, 8)."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 4)).unbind(-3)
        x = x + self.out(self.attend(q, k, v).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class DenseViT(nn.Module):
    """Tiles with a class token, positions, a block; the class tokens and the means are the results."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.block = Block(_dense)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = self.block(x)
        return x[:, 0], x[:, 1:].mean(1)


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None].to(x.dtype) / torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


INDEPENDENT = {
    "batch norm in eval": made(lambda: OnRows(nn.BatchNorm1d(8).eval())),
    "masked tokens": lambda x, keep: x.masked_fill(~keep[:, None], 0),
    "rotary positions": of(_rotated, tolerance=4),
    "two results": lambda x, ids: (x * 2, ids + 1),
    "tiles pooled": lambda x, tiles: x + tiles.mean(1),
    "packed attention less its input": of(
        lambda x, cu: attend_packed(attend_packed(x, cu) + x, cu) - x, layout="own"
    ),
    "dense ViT": made(DenseViT, layout="own", tolerance=8),
}
