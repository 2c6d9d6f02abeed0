"""Images as tiles of one size: towers of equal tiles, and towers with a whole view and crops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from fxsplit_encoder.models.builders import Settings, vision_settings
from fxsplit_encoder.models.preparation import (
    CLIP,
    HALF,
    IMAGENET,
    Normalization,
    Preparation,
    Prepared,
    ProcessorSettings,
    frames_of,
)
from fxsplit_encoder.models.tiling import DEEPSEEK_SMALL, deepseek_crops, llama4_tiles, step3_views


@dataclass(frozen=True)
class OneTile(Preparation):
    """An image is a tile, by transformers' own processor of the family, the one without torchvision."""

    processor: Any

    @classmethod
    def of_siglip(cls, settings: Settings, processor: ProcessorSettings) -> OneTile:
        """SigLIP's: images are stretched to squares."""
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        side = _side(settings, 224)
        return cls(
            SiglipImageProcessorPil(size={"height": side, "width": side}, **_statistics(HALF, processor))
        )

    @classmethod
    def cropping(cls, normalization: Normalization) -> Callable[[Settings, ProcessorSettings], OneTile]:
        """CLIP's and DINOv2's: the square in an image's middle."""

        def read(settings: Settings, processor: ProcessorSettings) -> OneTile:
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

            side = _side(settings, 224)
            resized = (processor.image.get("size") or {}).get("shortest_edge", side)
            return cls(
                CLIPImageProcessorPil(
                    size={"shortest_edge": max(resized, side)},
                    crop_size={"height": side, "width": side},
                    **_statistics(normalization, processor),
                )
            )

        return read

    def image(self, image: Image.Image) -> Prepared:
        """One tile."""
        return _tiles(self.processor(images=[image], return_tensors="pt")["pixel_values"])


@dataclass(frozen=True)
class InternVLTiles(Preparation):
    """A grid of tiles whose shape is nearest to the image's, and behind several the whole image as one more.

    A frame of a clip is a tile.
    """

    processor: Any
    side: int
    normalization: Normalization
    takes_clips = True

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> InternVLTiles:
        """InternVL's; its processor uses that of GOT-OCR 2."""
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        side, statistics = _side(settings, 448), _statistics(IMAGENET, processor)
        made = GotOcr2ImageProcessorPil(
            size={"height": side, "width": side},
            crop_to_patches=True,
            min_patches=processor.image.get("min_patches", 1),
            max_patches=processor.image.get("max_patches", 12),
            **statistics,
        )
        return cls(made, side, IMAGENET.updated(processor.image))

    def image(self, image: Image.Image) -> Prepared:
        """1 to 13 tiles."""
        return _tiles(self.processor(images=[image], return_tensors="pt")["pixel_values"])

    def clip(self, clip: Image.Image) -> list[Prepared]:
        """A tile a frame."""
        tiles = self.normalization(list(frames_of(clip, (self.side, self.side))))
        count = tiles.shape[0]
        tensors = {"pixel_values_videos": tiles, "video_num_patches": torch.tensor([count])}
        return [Prepared(tensors, {"tiles": count}, str(count), count)]


@dataclass(frozen=True)
class Llama4Tiles(Preparation):
    """A canvas of up to 16 tiles, and behind several the whole image as one more."""

    side: int
    max_tiles: int
    normalization: Normalization

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> Llama4Tiles:
        """Llama 4's."""
        return cls(
            _side(settings, 448), processor.image.get("max_patches", 16), HALF.updated(processor.image)
        )

    def image(self, image: Image.Image) -> Prepared:
        """1 to 17 tiles."""
        return _tiles(self.normalization(llama4_tiles(image, self.side, self.max_tiles)[1]))


@dataclass(frozen=True)
class DeepseekOcrViews(Preparation):
    """A page as a whole and, if it is large and the mode has crops, as 2 to 9 of them.

    The model's modes are two sizes; those with two equal ones have no crops. The whole page keeps its aspect
    ratio, on grey; small modes without crops stretch it.
    """

    whole: int
    crop: int
    max_crops: int
    normalization: Normalization

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> DeepseekOcrViews:
        """Those of the checkpoint's `base_size` and `image_size`; of the mode "Gundam" without."""
        from fxsplit_encoder.modules.deepseek_encoder import DeepseekOcrConfig

        whole = settings.get("base_size", DeepseekOcrConfig.base_size)
        crop = settings.get("image_size", DeepseekOcrConfig.image_size)
        return cls(whole, crop, 9, HALF.updated(processor.image))

    def image(self, image: Image.Image) -> Prepared:
        """Both views."""
        has_crops, size = self.crop != self.whole, (self.whole, self.whole)
        grid, crops = deepseek_crops(image, self.crop, self.max_crops) if has_crops else ((1, 1), [])
        if has_crops or self.whole > DEEPSEEK_SMALL:
            grey = tuple(int(255 * mean) for mean in self.normalization.mean)
            whole = ImageOps.pad(image, size, Image.Resampling.BICUBIC, color=grey)
        else:
            whole = image.resize(size, Image.Resampling.BICUBIC)
        return _views(
            {"pixel_values": self.normalization([whole]), "images_spatial_crop": torch.tensor([grid])},
            "images_crop",
            _normalized(crops, self.crop, self.normalization),
            grid,
        )


@dataclass(frozen=True)
class Step3Views(Preparation):
    """An image as a whole and, if it is large or elongated, as crops."""

    whole: int
    crop: int
    names: tuple[str, str]
    """The keys of the crops and of their number."""
    normalization: Normalization

    @classmethod
    def reader(cls, crops: str, count: str) -> Callable[[Settings, ProcessorSettings], Step3Views]:
        """Step3's and Step-3.7's, which call the crops and their number differently."""

        def read(settings: Settings, processor: ProcessorSettings) -> Step3Views:
            side = _side(settings, 728)
            return cls(side, 504, (crops, count), CLIP.updated(processor.image))

        return read

    def image(self, image: Image.Image) -> Prepared:
        """Both views."""
        grid, whole, crops = step3_views(image, self.whole, self.crop)
        name, count = self.names
        return _views(
            {"pixel_values": self.normalization([whole]), count: torch.tensor([len(crops)])},
            name,
            _normalized(crops, self.crop, self.normalization),
            grid,
        )


def _tiles(tiles: Tensor) -> Prepared:
    count = tiles.shape[0]
    return Prepared(
        {"pixel_values": tiles, "num_patches": torch.tensor([count])}, {"tiles": count}, str(count)
    )


def _views(tensors: dict[str, Tensor], name: str, crops: Tensor, grid: tuple[int, int]) -> Prepared:
    count = crops.shape[0]
    return Prepared(
        {**tensors, name: crops}, {"crops": grid if count else (0, 0)}, f"1+{count}" if count else "1"
    )


def _normalized(images: list[Image.Image], side: int, normalization: Normalization) -> Tensor:
    return normalization(images) if images else torch.zeros(0, 3, side, side)


def _side(settings: Settings, default: int) -> int:
    """Pixels a side of a tile; `default` is that of the configuration's class."""
    size = vision_settings(settings).get("image_size", default)
    side: int = size if isinstance(size, int) else size[0]
    return side


def _statistics(base: Normalization, processor: ProcessorSettings) -> dict[str, Any]:
    own = base.updated(processor.image)
    return {"image_mean": list(own.mean), "image_std": list(own.std)}
