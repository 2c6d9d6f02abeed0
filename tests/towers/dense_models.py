"""Tiny dense models, and tiles for them.

In a module of its own, not in a conftest: Dynamo traces some of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxsplit_encoder as fx

SHAPE = (3, 16, 16)


class PlainTower(nn.Module):
    """A dense tower that comes from no library: a class token, two blocks of attention, all rows returned."""

    def __init__(self, width: int = 16, heads: int = 2, patch: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, images: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        for qkv, norm in zip(self.qkv, self.norms, strict=True):
            heads = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, -1)
            )
            x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return {"features": x * scale}


class BiasedTower(PlainTower):
    """Attention gets a bias of each image's own, as relative positions make it."""

    def forward(self, images: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for qkv in self.qkv:
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            bias = q @ q.transpose(-1, -2)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return {"features": x * scale}


def random_tiles(count: int, shape: Sequence[int] = SHAPE, seed: int = 0) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-5) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def encoded(wrapped: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Every item of a batch, without a capture."""
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(mode="none"), log_interval=0)
    items: list[Tensor] = manager.execute(inputs)
    assert all(item.untyped_storage().nbytes() == item.nbytes for item in items)
    return items
