"""Cut images into tiles, and make the inputs of families with tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from fxsplit_encoder.models.family import Settings, vision_settings
from fxsplit_encoder.models.prepare import Normalization, Preparation, Prepared, processed
from fxsplit_encoder.towers.tiles import VIDEO_COUNTS

Grid = tuple[int, int]
"""(columns, rows)."""

MOST_TILES = 256
"""That an option may ask for: every grid of so many is looked at."""


def tile_side(settings: Settings, default: int) -> int:
    """Pixels a side of a tile; `default` is that of the configuration's class."""
    size = vision_settings(settings).get("image_size", default)
    side: int = size if isinstance(size, int) else size[0]
    return side


def cut(image: Image.Image, width: int, height: int) -> Iterator[Image.Image]:
    """The tiles of an image row by row; what is left over at its right and lower edge is dropped."""
    for top in range(0, image.height - height + 1, height):
        for left in range(0, image.width - width + 1, width):
            yield image.crop((left, top, left + width, top + height))


def of_tiles(tiles: Tensor) -> Prepared:
    """An image of equal tiles, (tiles, 3, side, side)."""
    return tile_sizes(tiles.shape[0]).with_pixels(pixel_values=tiles)


def tile_sizes(count: int) -> Prepared:
    """An image of that many tiles, without their pixels."""
    return Prepared({"num_patches": torch.tensor([count], device="cpu")}, {"tiles": count})


def frame_sizes(count: int) -> Prepared:
    """A clip of that many frames, without their pixels."""
    return Prepared({VIDEO_COUNTS: torch.tensor([count], device="cpu")}, {"tiles": count}, frames=count)


def view_sizes(tensors: dict[str, Tensor], grid: Grid) -> Prepared:
    """An image seen as a whole and as crops, without their pixels."""
    return Prepared(tensors, {"crops": grid})


def crop_pixels(crops: list[Image.Image], side: int, normalization: Normalization) -> Tensor:
    """(crops, 3, side, side), of no crops too."""
    return normalization(crops) if crops else torch.zeros(0, 3, side, side, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class ProcessedTiles(Preparation):
    """An image as the tiles that an image processor of transformers makes of it, one without torchvision."""

    processor: Any
    options: ClassVar[Mapping[str, Any]] = {}
    """Of each call of the processor."""

    def image(self, image: Image.Image) -> Prepared:
        """Returns as many tiles as the processor makes."""
        tiles = processed(self.processor, image, **self.options)["pixel_values"]
        return of_tiles(tiles.flatten(0, -4))

    def image_sizes(self, width: int, height: int) -> Prepared:
        """Returns the sizes of as many tiles as the processor makes of this size, or of one."""
        count = getattr(self.processor, "get_number_of_image_patches", None)
        return tile_sizes(1 if count is None else count(height, width, {**self.options}))
