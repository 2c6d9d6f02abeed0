"""What families of tiles have in common: cutting images, and their inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor

from fxsplit_encoder.models.family import Settings, vision_settings
from fxsplit_encoder.models.prepare import Normalization, Prepared

Grid = tuple[int, int]
"""(columns, rows)."""


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
    count = tiles.shape[0]
    return Prepared(
        {"pixel_values": tiles, "num_patches": torch.tensor([count])}, {"tiles": count}, str(count)
    )


def of_views(tensors: dict[str, Tensor], name: str, crops: Tensor, grid: Grid) -> Prepared:
    """An image seen as a whole and as crops.

    Args:
        tensors: the whole view, and the number of crops.
        name: the key of the crops.
        crops: (crops, 3, side, side).
        grid: of the crops, if there are any.
    """
    count = crops.shape[0]
    return Prepared(
        {**tensors, name: crops}, {"crops": grid if count else (0, 0)}, f"1+{count}" if count else "1"
    )


def crop_pixels(crops: list[Image.Image], side: int, normalization: Normalization) -> Tensor:
    """(crops, 3, side, side), of no crops too."""
    return normalization(crops) if crops else torch.zeros(0, 3, side, side)
