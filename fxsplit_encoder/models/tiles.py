"""Families whose images are equal tiles: InternVL, a grid of them, and Llama 4, a canvas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import Frames, MediaSettings
from fxsplit_encoder.media.images import bicubic
from fxsplit_encoder.models.eager import PIXELS, Inputs, joined
from fxsplit_encoder.models.family import (
    WHOLE_MODEL,
    Family,
    Settings,
    given,
    hugging_face,
    text_width,
    vision_settings,
    without_language_model,
)
from fxsplit_encoder.models.prepare import (
    HALF,
    IMAGENET,
    Normalization,
    Preparation,
    Prepared,
    ProcessorSettings,
    processed,
)
from fxsplit_encoder.models.sampling import Sampling, middle_of_equal_parts
from fxsplit_encoder.towers.base import VIDEOS
from fxsplit_encoder.towers.tiles import VIDEO_COUNTS, CropGrid

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


def check_enlarged(width: int, height: int) -> None:
    """Raises MediaError for an image so elongated that it becomes too many pixels before it is cut."""
    most = MediaSettings().max_pixels
    if width * height > most:
        raise MediaError(f"too elongated: resized to {width} x {height} before it is cut, over {most} pixels")


def tile_sizes(count: int) -> Prepared:
    """An image of that many tiles, without their pixels."""
    return Prepared({"num_patches": torch.tensor([count], device="cpu")}, {"tiles": count})


@dataclass(frozen=True)
class ProcessedTiles(Preparation):
    """An image as the tiles that an image processor of transformers makes of it, one without torchvision."""

    processor: Any
    options: ClassVar[Mapping[str, Any]] = {}
    """Of each call of the processor."""

    def image(self, image: Image.Image) -> Prepared:
        """Returns as many tiles as the processor makes."""
        self.image_sizes(*image.size)  # before the processor, which does not refuse what is too elongated
        tiles = processed(self.processor, image, **self.options)["pixel_values"].flatten(0, -4)
        return tile_sizes(tiles.shape[0]).with_pixels(pixel_values=tiles)

    def image_sizes(self, width: int, height: int) -> Prepared:
        """Returns the sizes of as many tiles as the processor makes of this size, or of one."""
        count = getattr(self.processor, "get_number_of_image_patches", None)
        return tile_sizes(1 if count is None else count(height, width, {**self.options}))


# --- InternVL


def _build_internvl(settings: Settings) -> nn.Module:
    """`InternVLModel` without its language model."""
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    text = {"model_type": "qwen2", "intermediate_size": 8, "hidden_size": text_width(settings)}
    return without_language_model(
        "internvl",
        "InternVLModel",
        {**text, **no_tokens},
        vision_config=vision_settings(settings),
        **given(settings, "downsample_ratio", "projector_hidden_act"),
        **given(settings, "vision_feature_layer", "vision_feature_select_strategy"),
    )


@dataclass(frozen=True)
class InternVLTiles(ProcessedTiles):
    """A grid of tiles whose shape is nearest to the image's, and after several the whole image as one more.

    A frame of a clip is a tile.
    """

    side: int
    normalization: Normalization
    sampling: Sampling
    # Its whole processor asks for crops, whatever the image processor's own settings are.
    options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}
    takes_clips = True
    image_options: ClassVar[Mapping[str, int]] = {"min_patches": MOST_TILES, "max_patches": MOST_TILES}

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> InternVLTiles:
        """InternVL's; its processor uses that of GOT-OCR 2."""
        side, normalization = tile_side(settings, 448), IMAGENET.updated(processor.image)
        sampling = Sampling(middle_of_equal_parts).updated(processor.video)
        made = processor.image_processor(
            "got_ocr2",
            "GotOcr2",
            size={"height": side, "width": side},
            crop_to_patches=True,
            min_patches=processor.image.get("min_patches", 1),
            max_patches=processor.image.get("max_patches", 12),
            **normalization.as_settings(),
        )
        return cls(made, side, normalization, sampling)

    def clip(self, frames: Frames) -> list[Prepared]:
        """A tile per frame."""
        (sizes,) = self.clip_sizes(len(frames), *frames.size)
        tiles = self.normalization([bicubic(frame, (self.side, self.side)) for frame in frames])
        return [sizes.with_pixels(**{VIDEOS: tiles})]

    def clip_sizes(self, num_frames: int, width: int, height: int) -> list[Prepared]:
        """A tile per frame."""
        counts = {VIDEO_COUNTS: torch.tensor([num_frames], device="cpu")}
        return [Prepared(counts, {"tiles": num_frames}, num_frames)]


def _eager_internvl(model: Any, mm_kwargs: Inputs) -> Tensor:
    """A frame of a clip is a tile."""
    features: Tensor = model.get_image_features(joined(mm_kwargs, PIXELS), return_dict=True).pooler_output
    return features.flatten(0, 1)


# --- Llama 4


def _build_llama4(settings: Settings) -> nn.Module:
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
        tiles = self.normalization(llama4_tiles(image, self.side, self.max_tiles))
        return tile_sizes(tiles.shape[0]).with_pixels(pixel_values=tiles)

    def image_sizes(self, width: int, height: int) -> Prepared:
        """1 to 17 tiles."""
        columns, rows = llama4_grid(width, height, self.side, self.max_tiles)
        return tile_sizes(columns * rows + (columns * rows > 1))


# As transformers' Llama4ImageProcessor, which needs torchvision, does it.


def llama4_grid(width: int, height: int, tile: int, max_tiles: int) -> CropGrid:
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


def _eager_llama4(model: Any, mm_kwargs: Inputs) -> Tensor:
    """With the projector, which the model applies past `get_image_features`; a bare tower without."""
    tower = getattr(model, "vision_model", model)
    features: Tensor = tower(mm_kwargs["pixel_values"], return_dict=True).last_hidden_state
    projector = getattr(model, "multi_modal_projector", None)
    return (features if projector is None else projector(features)).flatten(0, 1)


FAMILIES = {
    "internvl": Family(_build_internvl, InternVLTiles.read, _eager_internvl, WHOLE_MODEL),
    "llama4": Family(_build_llama4, Llama4Tiles.read, _eager_llama4, WHOLE_MODEL),
    "llama4_vision_model": Family(
        hugging_face("llama4", "Llama4VisionModel"), Llama4Tiles.read, _eager_llama4
    ),
}
