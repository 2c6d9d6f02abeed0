"""Qwen3-VL's vision tower (dense and mixture-of-experts models share it): deepstack features beside the main
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.taps import TAPS, interpolation


class Qwen3VLTower(PackedTower):
    """Wraps `Qwen3VLVisionModel` and `Qwen3VLMoeVisionModel`.

    An item's embedding is (output tokens, out_hidden_size * (1 + deepstack levels)): the main output, then
    every deepstack level, along the hidden dimension.
    """

    has_plain_blocks = True
    metadata_columns: ClassVar[dict[str, tuple[int, torch.dtype]]] = {
        "position_ids": (2, torch.int64),
        "interp_indices": (TAPS["bilinear"], torch.int32),
        "interp_weights": (TAPS["bilinear"], torch.float32),
    }

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        levels = 1 + len(getattr(config, "deepstack_visual_indexes", ()))
        super().__init__(
            tower,
            merge_size=config.spatial_merge_size,
            patch_features=config.in_channels * config.temporal_patch_size * config.patch_size**2,
            out_hidden_size=config.out_hidden_size * levels,
        )
        side: Any = tower.num_grid_per_side
        self.table_shape: tuple[int, int] = (side, side)
        self.align_corners: bool = tower.interpolation_align_corners  # type: ignore[assignment]

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Positions for the rotary embedding, and taps into the learned position table."""
        indices, weights = interpolation(
            grids, self.table_shape, self.merge_size, self.align_corners, mode="bilinear"
        )
        return {
            "position_ids": grids_of.positions(grids, self.merge_size),
            "interp_indices": indices,
            "interp_weights": weights,
        }

    def packed_output(self, output: Any) -> Tensor:
        """The main output, then every deepstack level, along the hidden dimension."""
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)
