"""Kimi-VL's vision tower: MoonViT with its projector. Images only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.inputs import integer_rows
from fxsplit_encoder.towers.raster import RasterTower


class KimiVLTower(RasterTower):
    """Wraps `KimiVLVisionModel`.

    `mm_kwargs` are `pixel_values` (patches, 3, patch_size, patch_size) in raster order and `image_grid_hws`
    (images, 2) in patches. An image's embedding is (output tokens, text_hidden_size).
    """

    input_names: ClassVar[tuple[str, str]] = ("pixel_values", "image_grid_hws")
    input_keys: ClassVar[tuple[tuple[str, str], ...]] = (("pixel_values", "image_grid_hws"),)
    modalities: Sequence[str] = ("image",)
    max_frames_per_video: int = 1

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        super().__init__(
            tower,
            merge_kernel=config.merge_kernel_size,
            patch_size=config.patch_size,
            table_shape=(config.init_pos_emb_height, config.init_pos_emb_width),
            out_hidden_size=config.text_hidden_size,
        )

    def read_grids(self, grids: Any, name: str) -> list[Grid]:
        """Images as grids of one frame, from (images, 2) heights and widths."""
        rows = integer_rows(grids, name, 2, "rows of two integers (height, width) in patches")
        return grids_of.read_grids([(1, *row) for row in rows], self.merge_size, name)

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some images, in the order of `indices`."""
        selected = super().select_encoder_cudagraph_items(mm_kwargs, indices)
        sizes = [(height, width) for _, height, width in selected.get("image_grid_hws", ())]
        return {**selected, "image_grid_hws": sizes} if sizes else selected

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        """Patches and the size of one image of the smallest budget's size."""
        patches, grid = super().example_inputs()
        return patches, grid[:, 1:]

    def core(
        self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor], **kwargs: Any
    ) -> Tensor:
        """The tower and its projector past the host metadata."""
        result: Tensor = self.tower(self.as_images(pixel_values), cu_seqlens, **metadata)
        return result

    def packed_output(self, output: Tensor) -> Tensor:
        """The embeddings as they are."""
        return output
