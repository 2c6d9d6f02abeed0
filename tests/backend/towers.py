"""Towers behind torch.compile, and modules of dense attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

GRID = torch.tensor([[1, 4, 6]])
OPTIONS = {"token_budgets": [8, 16], "mode": "full"}


def compiled(tower: Any, **options: Any) -> Any:
    return torch.compile(tower, backend="encoder_cg", fullgraph=True, options={**OPTIONS, **options})


def compile_it(module: Any, dynamic: bool | None = None, **options: Any) -> Any:
    return torch.compile(module, backend="encoder_cg", dynamic=dynamic, options=options)


@torch.no_grad()
def features(tower: Any, pixels: Tensor) -> Tensor:
    output: Tensor = tower(pixels, GRID)
    return output


def num_weights(inner: Any) -> int:
    """Of the blocks, and of the mergers behind some of them, which are equal too."""
    mergers = getattr(inner, "deepstack_merger_list", ())
    return sum(len(list(part.parameters())) for part in (*inner.blocks, *mergers))


def assert_equal_features(tower: Any, inner: Any, pixels: Tensor) -> None:
    torch.testing.assert_close(features(tower, pixels), features(inner, pixels), rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """A layer over (batch, tokens, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
