"""Towers whose patches come in raster order: the common part of their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from fxsplit_encoder.errors import UnsupportedTowerError
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.merge import merge_order
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.taps import TAPS, interpolation


class RasterTower(PackedTower):
    """The common part of adapters whose patches are (patches, 3, patch_size, patch_size) in raster order.

    Rows keep that order from the pixels to the last block. Only then are they permuted, so that those of an
    output token follow one another: it costs no pass over the pixels, and the tower's hidden states are in
    the order that its callers know.
    """

    has_plain_blocks = True
    metadata_columns: ClassVar[dict[str, tuple[int, torch.dtype]]] = {
        "position_ids": (2, torch.int64),
        "interp_indices": (TAPS["bicubic"], torch.int32),
        "interp_weights": (TAPS["bicubic"], torch.float32),
        "merge_order": (0, torch.int64),
    }

    def __init__(
        self,
        tower: nn.Module,
        *,
        merge_kernel: Sequence[int],
        patch_size: int,
        table_shape: tuple[int, int],
        out_hidden_size: int,
    ) -> None:
        height, width = merge_kernel
        if height != width:
            raise UnsupportedTowerError(
                f"{type(tower).__name__}: merge_kernel_size: expected a square; got {height} x {width}"
            )
        super().__init__(
            tower, merge_size=height, patch_features=3 * patch_size**2, out_hidden_size=out_hidden_size
        )
        self.patch_shape = (3, patch_size, patch_size)
        self.table_shape = table_shape

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Positions for the rotary embedding, taps into the learned position table, and the merge order."""
        indices, weights = interpolation(
            grids, self.table_shape, merge_size=1, align_corners=False, mode="bicubic"
        )
        return {
            "position_ids": grids_of.positions(grids, merge_size=1),
            "interp_indices": indices,
            "interp_weights": weights,
            "merge_order": merge_order(grids, self.merge_size),
        }

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        """Patches and the grid of one image of the smallest budget's size."""
        patches, grid = super().example_inputs()
        return self.as_images(patches), grid

    def as_images(self, patches: Tensor) -> Tensor:
        """Flattened patches as (patches, 3, patch_size, patch_size)."""
        return patches.view(patches.shape[0], *self.patch_shape)
