"""Layers of transformers that several encoders share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.folded import FoldedTable, resized_positions


class FusedAttention(nn.Module):
    """Attention of every row of a batch, with one projection for queries, keys and values."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden_size) to the same."""
        qkv = torch.unflatten(self.qkv_proj(x), -1, (3, self.num_heads, -1))
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


class _Layer(nn.Module):
    def __init__(self, config: Any, norms_follow: bool) -> None:
        super().__init__()
        self.norms_follow = norms_follow
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = FusedAttention(config.hidden_size, config.num_attention_heads)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = QuickGeluMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        for norm, branch in ((self.layer_norm1, self.self_attn), (self.layer_norm2, self.mlp)):
            x = x + (norm(branch(x)) if self.norms_follow else branch(norm(x)))
        return x


class EncoderLayers(nn.Module):
    """Layers of attention and an MLP, whose layer norms come before them, or after with `norms_follow`."""

    def __init__(self, config: Any, *, norms_follow: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config, norms_follow) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = layer(x)
        return x


class ClassEmbeddings(nn.Module):
    """`count` equal class tokens, then a feature map row by row, with positions learned at the grid of the
    configuration and resized to other `sides`. The patch embedding is for a subclass to call.
    """

    def __init__(self, config: Any, sides: Iterable[int], *, count: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.count = count
        size, side = config.patch_size, config.image_size // config.patch_size
        self.class_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, size, stride=size, bias=bias)
        self.position_embedding = nn.Embedding(1 + side**2, config.hidden_size)
        resize = functools.partial(resized_positions, mode="bicubic", leading=1, antialias=True)
        self.positions = FoldedTable("position_embedding.weight", resize, sides)

    def forward(self, features: Tensor) -> Tensor:
        """(images, hidden, side, side) to (images, count + side * side, hidden)."""
        positions = self.positions(features.shape[-1])
        first = (self.class_embedding + positions[:1]).expand(self.count, -1)
        patches = F.pad(features.flatten(2).transpose(1, 2), (0, 0, self.count, 0))
        # The rows that were padded are zero, so that the class tokens come with their position.
        return patches + torch.cat((first, positions[1:]))


def check_tiles(pixel_values: Tensor, sizes: Sequence[int]) -> None:
    """Raises InputError unless these are (tiles, 3, size, size) of one of the encoder's sizes."""
    if tuple(pixel_values.shape[1:]) not in {(3, size, size) for size in sizes}:
        named = " or ".join(str(size) for size in sizes)
        raise InputError(
            f"pixel_values: expected (tiles, 3, size, size) with a size of {named}; got "
            f"{tuple(pixel_values.shape)}; the configuration sets the sizes"
        )
