"""Step3: images seen as a whole and, if they are large, as crops."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fxsplit_encoder.towers.modules.step3_vision import Step3VisionConfig, Step3VisionModel
from fxsplit_encoder.towers.tiles import TiledTower, View, downsampled, square_view


class Step3VLTower(TiledTower):
    """Wraps `Step3VisionModel`. `mm_kwargs`: `pixel_values` (images, 3, 728, 728), `num_patches` (images),
    `patch_pixel_values` (crops, 3, 504, 504). An embedding is 81 rows a crop, then 169 of the whole image.
    """

    has_plain_blocks = True
    count_key: ClassVar[str] = "num_patches"

    def __init__(self, tower: Step3VisionModel) -> None:
        config = tower.config
        super().__init__(
            tower,
            whole=_view("pixel_values", config.image_size, config),
            crop=_view("patch_pixel_values", config.crop_size, config),
            out_hidden_size=config.out_hidden_size,
        )

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """The features of tiles."""
        return self.tower(tiles).flatten(0, 1)  # type: ignore[no-any-return]


def _view(input_name: str, size: int, config: Step3VisionConfig) -> View:
    tokens = downsampled(size // config.patch_size // 2) ** 2
    return square_view(input_name, size, config.patch_size, tokens)
