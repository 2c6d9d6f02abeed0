"""Forwards whose rows are independent: padded replays must serve them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import made, of, on_rows
from .placing import attend_packed


class Block(nn.Module):
    """A transformer block of (..., tokens, 8)."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 4)).unbind(-3)
        x = x + self.out(self.attend(q, k, v, *args).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def _packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    return torch.ops.fxsplit.varlen_attention(q, k, v, cu, q.shape[0], 0.5)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class PackedViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(_packed) for _ in range(2))

    def forward(self, x: Tensor, cu: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cu)
        return x


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


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.table(ids)


class ConvTiles(nn.Module):
    """Convolution, pooling and normalization within every batch entry."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.block = Block(_dense)

    def forward(self, tiles: Tensor) -> Tensor:
        return self.block(F.gelu(self.norm(self.conv(tiles.transpose(1, 2)))).transpose(1, 2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None].to(x.dtype) / torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


INDEPENDENT = {
    "activations": lambda x: F.gelu(x) + F.silu(x) * x.tanh() + x.abs().sqrt(),
    "gated MLP": made(Gated, tolerance=4),
    "layer norm": made(lambda: on_rows(nn.LayerNorm(8)), tolerance=4),
    "batch norm in eval": made(lambda: on_rows(nn.BatchNorm1d(8).eval())),
    "statistics of features": lambda x: (x - x.mean(1, keepdim=True)) / (x.amax(1, keepdim=True) + 5),
    "features cut and joined": lambda x: torch.cat([x[:, 4:], -x[:, :4]], 1),
    "heads": lambda x: x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8),
    "gain": lambda x, gain: x * gain,
    "masked tokens": lambda x, keep: x.masked_fill(~keep[:, None], 0),
    "embedded ids": made(Embeds),
    "rotary positions": of(_rotated, tolerance=4),
    "two results": lambda x, ids: (x * 2, ids + 1),
    "tiles pooled": lambda x, tiles: x + tiles.mean(1),
    "packed ViT": made(PackedViT, layout="own", tolerance=8),
    "packed ViT less its input": of(
        lambda x, cu: attend_packed(attend_packed(x, cu) + x, cu) - x, layout="own"
    ),
    "dense ViT": made(DenseViT, layout="own", tolerance=8),
    "convolutions within tiles": made(ConvTiles, layout="own", tolerance=8),
}
