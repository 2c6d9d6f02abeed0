"""Llama 4: an image as a canvas of equal tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch import Tensor, nn

from fxsplit_encoder.models.eager import Inputs
from fxsplit_encoder.models.family import (
    WHOLE_MODEL,
    Family,
    Settings,
    hugging_face,
    text_width,
    vision_settings,
    without_language_model,
)
from fxsplit_encoder.models.prepare import HALF, Normalization, Preparation, Prepared, ProcessorSettings
from fxsplit_encoder.models.tiles import MOST_TILES, Grid, cut, of_tiles, tile_side, tile_sizes


def _build(settings: Settings) -> nn.Module:
    """`Llama4ForConditionalGeneration` without its language model."""
    moe = {"intermediate_size": 8, "intermediate_size_mlp": 8, "num_local_experts": 1, "head_dim": 8}
    return without_language_model(
        "llama4",
        "Llama4ForConditionalGeneration",
        {**moe, "pad_token_id": 0, "hidden_size": text_width(settings)},
        vision_config=vision_settings(settings),
    )


@dataclass(frozen=True)
class Llama4Tiles(Preparation):
    """A canvas of up to 16 tiles, and after several the whole image as one more."""

    side: int
    max_tiles: int
    normalization: Normalization
    image_options: ClassVar[Mapping[str, int]] = {"max_patches": MOST_TILES}

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> Llama4Tiles:
        """Llama 4's."""
        given = processor.image
        return cls(tile_side(settings, 448), given.get("max_patches", 16), HALF.updated(given))

    def image(self, image: Image.Image) -> Prepared:
        """1 to 17 tiles."""
        return of_tiles(self.normalization(llama4_tiles(image, self.side, self.max_tiles)))

    def image_sizes(self, width: int, height: int) -> Prepared:
        """1 to 17 tiles."""
        columns, rows = llama4_grid(width, height, self.side, self.max_tiles)
        return tile_sizes(columns * rows + (columns * rows > 1))


# As transformers' Llama4ImageProcessor, which needs torchvision, does it.


def llama4_grid(width: int, height: int, tile: int, max_tiles: int) -> Grid:
    """The canvas of whole tiles on which an image is shrunk least; where it could be enlarged, the one that
    enlarges it least. Among equals it is the smallest.
    """
    grids = [(c, r) for c in range(1, max_tiles + 1) for r in range(1, max_tiles // c + 1)]
    # In float32, as the processor compares them.
    across, down = (np.array(sides, np.float32) * tile for sides in zip(*grids, strict=True))
    scales = np.minimum(across / np.float32(width), down / np.float32(height))
    best = scales[scales >= 1].min() if (scales >= 1).any() else scales.max()
    equal = [grid for grid, scale in zip(grids, scales, strict=True) if scale == best]
    return min(equal, key=lambda grid: grid[0] * grid[1])


def llama4_tiles(image: Image.Image, tile: int, max_tiles: int) -> list[Image.Image]:
    """The tiles of `llama4_grid`; after several the whole image as one more.

    The image keeps its aspect ratio: it lies at the upper left of the canvas, on black. It is not enlarged
    beyond one tile.
    """
    columns, rows = llama4_grid(*image.size, tile, max_tiles)
    width = min(max(image.width, tile), columns * tile)
    height = min(max(image.height, tile), rows * tile)
    if width / image.width < height / image.height:
        height = min(int(image.height * (width / image.width)), height)
    else:
        width = min(int(image.width * (height / image.height)), width)
    canvas = Image.new("RGB", (columns * tile, rows * tile))
    canvas.paste(image.resize((max(width, 1), max(height, 1)), Image.Resampling.BILINEAR))
    tiles = list(cut(canvas, tile, tile))
    if len(tiles) == 1:
        return tiles
    return [*tiles, image.resize((tile, tile), Image.Resampling.BILINEAR)]


def _eager(model: Any, mm_kwargs: Inputs) -> Tensor:
    """With the projector, which the model applies past `get_image_features`; a bare tower without."""
    tower = getattr(model, "vision_model", model)
    features: Tensor = tower(mm_kwargs["pixel_values"], return_dict=True).last_hidden_state
    projector = getattr(model, "multi_modal_projector", None)
    return (features if projector is None else projector(features)).flatten(0, 1)


_LLAMA4 = Family(_build, Llama4Tiles.read, "tiles", _eager, WHOLE_MODEL)
_VISION_MODEL = Family(hugging_face("llama4", "Llama4VisionModel"), Llama4Tiles.read, "tiles", _eager)

FAMILIES = {"llama4": _LLAMA4, "llama4_vision_model": _VISION_MODEL}
