"""Step3: images seen as a whole and, if they are large, as crops."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fxsplit_encoder.towers.tiles import TiledTower, View, downsampled, square_view


class Step3VLTower(TiledTower):
    """Wraps `Step3VisionModel`. `mm_kwargs`: `pixel_values` (images, 3, 728, 728), `num_patches` (images),
    `patch_pixel_values` (crops, 3, 504, 504). An embedding is 81 rows a crop, then 169 of the whole image.
    """

    has_plain_blocks = True
    count_key: ClassVar[str] = "num_patches"

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        super().__init__(
            tower,
            whole=_view("pixel_values", config.image_size, config),
            crop=_view("patch_pixel_values", config.crop_size, config),
            out_hidden_size=config.out_hidden_size,
        )

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """The features of tiles."""
        features: Tensor = self.tower(tiles)
        return features.flatten(0, 1)


def _view(input_name: str, size: int, config: Any) -> View:
    tokens = downsampled(size // config.patch_size // 2) ** 2
    return square_view(input_name, size, config.patch_size, tokens)
