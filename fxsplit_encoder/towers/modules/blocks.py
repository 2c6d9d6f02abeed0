"""Parts that several encoders share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.rewriting import permute_rows
from fxsplit_encoder.errors import InputError


class Layers(nn.Module):
    """Layers one after the other."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = layer(x)
        return x


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


def tokens_with_class(features: Tensor, class_embedding: Tensor, positions: Tensor, count: int) -> Tensor:
    """(images, count + side * side, hidden): equal class tokens, then a feature map row by row.

    `features` are (images, hidden, side, side), `positions` (1 + side * side, hidden), first the class's.
    """
    first = (class_embedding + positions[:1]).expand(count, -1)
    patches = F.pad(features.flatten(2).transpose(1, 2), (0, 0, count, 0))
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


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of neighboring channels of (..., head_dim) by an angle, in float32."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def resample(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """(patches, hidden) at the weights' precision, from a table (entries, hidden) and `interpolation`."""
    # A sum of lookups, one per tap, is a single pointwise kernel when compiled; a reduction over all taps
    # would first write as many rows per patch.
    result = F.embedding(indices[:, 0], table) * weights[:, :1]
    for tap in range(1, weights.shape[1]):
        result = result + F.embedding(indices[:, tap], table) * weights[:, tap : tap + 1]
    return result


def merge(hidden: Tensor, permutation: Tensor, rows_per_token: int) -> Tensor:
    """(patches, hidden) to (tokens, rows_per_token, hidden), in the order of `merge_permutation`."""
    rows: Tensor = permute_rows(hidden, permutation)
    return rows.view(-1, rows_per_token, hidden.shape[-1])
