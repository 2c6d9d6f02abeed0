"""CLIP's transformer over features that another encoder made, as DeepSeek-OCR uses it.

Module and parameter names are those of the published checkpoint.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.towers.models.folded import FoldedTable, resized_positions

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ClipConfig:
    """Sizes; by default those of CLIP ViT-L/14."""

    image_size: int = 224
    """With `patch_size`: the grid whose positions are stored; others are interpolated."""
    patch_size: int = 14
    hidden_size: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    mlp_size: int = 4096
    layer_norm_eps: float = 1e-5


class ClipEncoder(nn.Module):
    """A feature map to tokens: a class token, then the positions row by row.

    Args:
        config: sizes.
        sides: of the feature maps that it will see.
    """

    def __init__(self, config: ClipConfig, sides: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config, sides)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)  # sic
        self.transformer = _Transformer(config)

    def forward(self, features: Tensor) -> Tensor:
        """(images, hidden_size, side, side) to (images, 1 + side * side, hidden_size)."""
        tokens: Tensor = self.transformer(self.pre_layrnorm(self.embeddings(features)))
        return tokens


class _Embeddings(nn.Module):
    def __init__(self, config: ClipConfig, sides: Sequence[int]) -> None:
        super().__init__()
        grid_side = config.image_size // config.patch_size
        self.class_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        # CLIP's own patch embedding is in the checkpoint; the features take its place.
        self.patch_embedding = nn.Conv2d(
            3, config.hidden_size, config.patch_size, stride=config.patch_size, bias=False
        )
        self.position_embedding = nn.Embedding(1 + grid_side**2, config.hidden_size)
        resize = functools.partial(resized_positions, mode="bicubic", leading=1, antialias=True)
        self.positions = FoldedTable("position_embedding.weight", resize, sides)

    def forward(self, features: Tensor) -> Tensor:
        positions = self.positions(features.shape[-1])
        first = self.class_embedding + positions[:1]
        patches = F.pad(features.flatten(2).transpose(1, 2), (0, 0, 1, 0))
        # The row that was padded is zero, so that the class token comes with its position.
        return patches + torch.cat((first, positions[1:]))


class _Transformer(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = FusedAttention(config.hidden_size, config.num_heads)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = QuickGeluMLP(config.hidden_size, config.mlp_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        y: Tensor = x + self.mlp(self.layer_norm2(x))
        return y


class FusedAttention(nn.Module):
    """Attention of every row of a batch, with one projection for queries, keys and values."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden_size) to the same."""
        qkv = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return y


class QuickGeluMLP(nn.Module):
    """Two layers with x * sigmoid(1.702 x) between them, OpenAI CLIP's approximation of GELU."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_size)
        self.fc2 = nn.Linear(mlp_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) to the same."""
        x = self.fc1(x)
        y: Tensor = self.fc2(x * torch.sigmoid(1.702 * x))
        return y
