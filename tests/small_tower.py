"""A packed tower of three equal blocks, which Dynamo traces in a fraction of the time of a published one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.kernels.attention import varlen_attention
from fxsplit_encoder.towers.grid import Grid, frame_lengths, positions

FEATURES, WIDTH = 12, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scaling = 0.35

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3, 2, WIDTH // 2).unbind(1)
        attended = varlen_attention(q, k, v, cu_seqlens, x.shape[0], self.scaling)
        result: Tensor = self.proj(attended.flatten(1))
        return result


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear_fc2(nn.functional.gelu(self.linear_fc1(x)))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cu_seqlens)
        return x + self.mlp(x)


class Merger(nn.Module):
    """Two by two patches, which follow one another, are a token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(x).view(-1, 4 * WIDTH))
        return result


class SmallTower(nn.Module):
    """A tower with weights of a seed, of which none is faint, so that faults show."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(FEATURES, WIDTH), nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.merger = Merger()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.normal_(float(parameter.dim() == 1), 0.3, generator=generator)
        self.requires_grad_(False).train(False)

    def forward(
        self, hidden_states: Tensor, grid_thw: Any = None, cu_seqlens: Any = None, places: Any = None
    ) -> Tensor:
        if cu_seqlens is None:
            grids: list[Any] = grid_thw.tolist()
            cu_seqlens = torch.tensor([0, *frame_lengths(grids)]).cumsum(0).int()
            places = positions(grids, 2)
        x = self.embed(hidden_states) + self.place(places.to(hidden_states.dtype))
        for block in self.blocks:
            x = block(x, cu_seqlens)
        result: Tensor = self.merger(x)
        return result


class SmallAdapter(fx.PackedTower):
    """The tower behind the manager's protocol and the backend's."""

    metadata_columns: ClassVar[dict[str, tuple[int, torch.dtype]]] = {"places": (2, torch.int64)}
    has_plain_blocks = True

    def __init__(self, tower: nn.Module | None = None) -> None:
        made = SmallTower() if tower is None else tower
        super().__init__(made, merge_size=2, patch_features=FEATURES, out_hidden_size=WIDTH)

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        return {"places": positions(grids, self.merge_size)}

    def core(self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]) -> Any:
        return self.tower(pixel_values, cu_seqlens=cu_seqlens, places=metadata["places"])

    def packed_output(self, output: Any) -> Tensor:
        result: Tensor = output
        return result


def wrapped(tower: Any) -> Any:
    """Any tower behind the protocol."""
    return SmallAdapter(tower) if isinstance(tower, SmallTower) else fx.wrap(tower)
