"""DeepSeek-OCR: pages seen as a whole and, if they are large, as a grid of crops."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.tiles import CropGrid, TiledTower, read_counts, square_view


class DeepseekOcrTower(TiledTower):
    """Wraps `DeepseekOcrVisionModel`. `mm_kwargs`: `pixel_values` (images, 3, base_size, base_size);
    `images_spatial_crop` (images, 2), columns and rows of crops, (1, 1) for none; `images_crop` (crops, 3,
    image_size, image_size) of all images, row by row.

    With s = base_size / 64 and c = image_size / 64 an embedding is its crops' features as one grid of (c
    rows) x (c columns), the whole image's s x s, both with a newline after every row, and the view separator:
    (c rows)(c columns + 1) + s (s + 1) + 1 rows, without crops s (s + 1) + 1.
    """

    attends_with_mask = True  # SAM's relative positions
    has_plain_blocks = True
    count_key: ClassVar[str] = "images_spatial_crop"

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        self.crop_side: int = config.image_size // config.pixels_per_feature
        side = config.base_size // config.pixels_per_feature
        super().__init__(
            tower,
            whole=square_view("pixel_values", config.base_size, config.sam.patch_size, side * (side + 1)),
            crop=square_view("images_crop", config.image_size, config.sam.patch_size, self.crop_side**2),
            out_hidden_size=config.out_hidden_size,
        )

    def crop_grids(self, mm_kwargs: dict[str, Any]) -> list[CropGrid]:
        """The crops of every image; a single one is the image itself, and is not encoded."""
        crops = mm_kwargs.get(self.count_key)
        if crops is None:
            raise InputError(
                f"{self.count_key}: expected the columns and rows of crops of every image in pixel_values; "
                "got None; pass both"
            )
        return [
            (columns, rows) if columns * rows > 1 else (0, 0)
            for columns, rows in read_counts(crops, self.count_key, 2)
        ]

    def select_grids(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """`images_spatial_crop` of some images."""
        crops = read_counts(mm_kwargs[self.count_key], self.count_key, 2)
        return {self.count_key: [crops[i] for i in indices]}

    def num_tokens(self, crops: CropGrid) -> int:
        """Rows of an image's embedding, newlines and separator included."""
        columns, rows = (self.crop_side * n for n in crops)
        newlines_and_crops = rows * (columns + 1)
        return newlines_and_crops + self.views["global"].tokens + 1

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """The features of tiles; those of whole images with their newlines."""
        features_NSC: Tensor = self.tower(tiles)
        if path == "local":
            return features_NSC.flatten(0, 1)
        side = tiles.shape[-1] // self.tower.config.pixels_per_feature
        grid_NHWC = F.pad(torch.unflatten(features_NSC, 1, (side, side)), (0, 0, 0, 1))
        # Added to zeros: a newline that were joined on would have to be repeated for every tile first.
        newlines_HWC = F.pad(self.tower.image_newline.expand(side, 1, -1), (0, 0, side, 0))
        return (grid_NHWC + newlines_HWC).flatten(0, 2)

    def assemble(self, whole: Tensor, tiles: Tensor, crops: CropGrid) -> Tensor:
        """Crops as one grid with newlines, the whole image, the separator."""
        separator = self.tower.view_seperator[None].to(whole.dtype)
        if not tiles.shape[0]:
            return torch.cat((whole, separator))
        columns, rows = crops
        side = self.crop_side
        grid = (
            tiles.view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        )
        newlines = self.tower.image_newline.to(whole.dtype).expand(rows * side, 1, -1)
        return torch.cat((torch.cat((grid, newlines), dim=1).flatten(0, 1), whole, separator))
