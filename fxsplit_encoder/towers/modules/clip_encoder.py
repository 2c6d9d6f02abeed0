"""CLIP's transformer over features that another encoder made, as DeepSeek-OCR uses it.

Module and parameter names are those of the published checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxsplit_encoder.towers.modules.blocks import FusedAttention, Layers, QuickGeluMLP, tokens_with_class
from fxsplit_encoder.towers.modules.folded import FoldedTable, resized_positions


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
        self.transformer = Layers(lambda: _Layer(config), config.num_layers)

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
        return tokens_with_class(features, self.class_embedding, self.positions(features.shape[-1]), 1)


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
