"""Qwen2-VL's vision tower: rotary positions only, and attention within frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.packed import PackedTower


class Qwen2VLTower(PackedTower):
    """Wraps `Qwen2VisionTransformerPretrainedModel`."""

    has_plain_blocks = True
    metadata_columns: ClassVar[dict[str, tuple[int, torch.dtype]]] = {"position_ids": (2, torch.int64)}

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        super().__init__(
            tower,
            merge_size=config.spatial_merge_size,
            patch_features=config.in_channels * config.temporal_patch_size * config.patch_size**2,
            # `embed_dim` is the width of its blocks.
            out_hidden_size=config.hidden_size,
        )

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Positions for the rotary embedding."""
        return {"position_ids": grids_of.positions(grids, self.merge_size)}
