"""SigLIP, SigLIP 2, CLIP, DINOv2 and DINOv3: an image is one tile, and the models have a vector of it.

SigLIP and CLIP have a text tower too, whose vectors are comparable.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image
from torch import Tensor, nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.media.images import BICUBIC, BILINEAR, ResizePlan
from fxsplit_encoder.models.checkpoint import Renames
from fxsplit_encoder.models.family import (
    WHOLE_MODEL,
    Build,
    Family,
    Prepare,
    Settings,
    TextTower,
    given,
    hugging_face,
    no_images,
    vision_settings,
)
from fxsplit_encoder.models.prepare import (
    CLIP,
    HALF,
    IMAGENET,
    Normalization,
    Preparation,
    Prepared,
    ProcessorSettings,
    processed,
)
from fxsplit_encoder.models.tiles import ProcessedTiles, check_enlarged, tile_side, tile_sizes
from fxsplit_encoder.towers import DenseTowerSpec
from fxsplit_encoder.towers.dense import Siglip2Tower, siglip2_tiles


@dataclass(frozen=True)
class SquareTile(ProcessedTiles):
    """An image stretched to a square, or the square in its middle."""

    side: int
    shortest: int = 0
    """To which the image's shorter side is resized, before it is cut; 0: it is stretched."""

    def image_sizes(self, width: int, height: int) -> Prepared:
        """One tile; MediaError: the image is too elongated."""
        self._resized(width, height)
        return super().image_sizes(width, height)

    def plan(self, width: int, height: int) -> ResizePlan | None:
        """One tile."""
        if self.processor.resample not in (BICUBIC, BILINEAR):
            return None
        rows, columns = self._resized(width, height)
        return ResizePlan(rows, columns, 1, 1, self.side, filter=int(self.processor.resample))

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns in pixels before the image is cut."""
        if not self.shortest:
            return self.side, self.side
        rows, columns = (self.shortest * each // min(width, height) for each in (height, width))
        check_enlarged(columns, rows)
        return rows, columns


def _tiles(normalization: Normalization, *, crops: bool) -> Prepare:
    """Images stretched to squares, or the square in their middle."""

    def read(settings: Settings, processor: ProcessorSettings) -> ProcessedTiles:
        size, crop = (_sides(processor.image.get(name)) for name in ("size", "crop_size"))
        own: dict[str, Any] = normalization.updated(processor.image).as_settings()
        own |= given(processor.image, "resample")
        side = (crop if crops else size).get("height") or tile_side(settings, 224)
        square = {"height": side, "width": side}
        if not crops:
            return SquareTile(processor.image_processor("siglip", "Siglip", size=square, **own), side)
        shortest = max(size.get("shortest_edge", side), side)
        own |= {"size": {"shortest_edge": shortest}, "crop_size": square}
        return SquareTile(processor.image_processor("clip", "CLIP", **own), side, shortest)

    return read


def _sides(size: Any) -> Mapping[str, int]:
    """A size of a processor's JSON file, where older ones have one number."""
    return dict.fromkeys(("height", "shortest_edge"), size) if isinstance(size, int) else size or {}


@dataclass(frozen=True)
class SizedPatches(Preparation):
    """SigLIP 2's images of their own aspect ratio as `Siglip2Tower` takes them: patches, places, a mask."""

    processor: Any
    patches: int
    """To which an image is padded."""

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> SizedPatches:
        """By the model's processor, with as many patches as its table of positions."""
        vision = vision_settings(settings)
        sizes = {"patch_size": vision.get("patch_size", 16), **HALF.updated(processor.image).as_settings()}
        return cls(processor.image_processor("siglip2", "Siglip2", **sizes), vision.get("num_patches", 256))

    def image(self, image: Image.Image) -> Prepared:
        """One tile, (1, patches, features and places)."""
        made = processed(self.processor, image, max_num_patches=self.patches)
        shape = made["spatial_shapes"][0].tolist()
        tiles = siglip2_tiles(made["pixel_values"], made["pixel_attention_mask"], [shape])
        return self._sizes(*shape).with_pixels(pixel_values=tiles)

    def image_sizes(self, width: int, height: int) -> Prepared:
        """One tile, and the grid of its patches."""
        from transformers.models.siglip2.image_processing_pil_siglip2 import (
            get_image_size_for_max_num_patches,
        )

        side = self.processor.patch_size
        sides = get_image_size_for_max_num_patches(height, width, side, self.patches)
        return self._sizes(sides[0] // side, sides[1] // side)

    def _sizes(self, rows: int, columns: int) -> Prepared:
        return replace(tile_sizes(1), layout={"grid": (1, rows, columns)})


def _spec(tower: Any, side: int | None, skipped: int) -> DenseTowerSpec:
    """Declares the last hidden state, without class and register tokens."""
    config = tower.config
    side = side or config.image_size
    shape = (config.num_channels, side, side)
    tokens = (side // config.patch_size) ** 2
    rows = slice(skipped + getattr(config, "num_register_tokens", 0), None)
    return DenseTowerSpec(shape, tokens, config.hidden_size, rows=rows)


def _pooled_spec(tower: Any, side: int | None, output: str = "pooler_output") -> DenseTowerSpec:
    """Declares the model's own vector, a row an image."""
    config = tower.config
    side = side or config.image_size
    width = config.projection_dim if output == "image_embeds" else config.hidden_size
    if not getattr(config, "vision_use_head", True):
        raise InputError("pooling: this tower has no head, so no vector of its own; use mean or none")
    return DenseTowerSpec(
        (config.num_channels, side, side), 1, width, output=functools.partial(_row, output=output)
    )


def _row(result: Any, output: str) -> Tensor:
    vector: Tensor = getattr(result, output)
    return vector[:, None]


def _family(build: Build, prepare: Prepare, prefix: str, skipped: int = 0, renames: Renames = ()) -> Family:
    """A family; `skipped`: rows of a tile's output before those of patches, without registers."""
    spec, pooled_spec = functools.partial(_spec, skipped=skipped), _pooled_spec
    pooled = Family(build, prepare, prefixes=(prefix, ""), renames=renames, spec=pooled_spec)
    return replace(pooled, spec=spec, pooled=pooled)


def _projected(tower: str, part: str) -> Build:
    """A tower of CLIP with the projection after it, whose width the whole model's settings hold."""
    build = hugging_face("clip", tower, part)

    def with_width(settings: Settings) -> nn.Module:
        own = settings.get(part, settings)
        width = settings.get("projection_dim", own.get("projection_dim", 512))
        return build({part: {**own, "projection_dim": width}})

    return with_width


def _siglip2(pooled_alone: bool, pooled: Family | None = None) -> Family:
    def adapter(tower: Any) -> Siglip2Tower:
        return Siglip2Tower(tower, tower.config.num_patches, pooled_alone=pooled_alone)

    return Family(
        hugging_face("siglip2", "Siglip2VisionModel"),
        SizedPatches.read,
        prefixes=("vision_model.", ""),
        adapter=adapter,
        pooled=pooled,
        pads_rows=not pooled_alone,
    )


def _text(build: Build, prefixes: tuple[str, ...], output: str, padding: str) -> TextTower:
    return TextTower(Family(build, no_images, prefixes=prefixes), output, padding)


_TEXT, _VISION = "text_config", "vision_config"
_DINOV2_NAMES: Renames = (
    (r"\.attention\.attention\.([qkv])[a-z]+\.", r".attention.\1_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
)
_DINOV3_NAMES: Renames = ((r"^layer\.", "model.layer."),)
_STRETCHING, _CROPPING = _tiles(HALF, crops=False), _tiles(CLIP, crops=True)

_SIGLIP = _family(hugging_face("siglip", "SiglipVisionModel"), _STRETCHING, "vision_model.")
_SIGLIP_TEXT, _SIGLIP2_TEXT = (
    _text(hugging_face(module, f"{name}TextModel", _TEXT), ("text_model.", ""), "pooler_output", "max_length")
    for module, name in (("siglip", "Siglip"), ("siglip2", "Siglip2"))
)
_SIGLIP2 = _siglip2(False, _siglip2(True))
_CLIP = _family(hugging_face("clip", "CLIPVisionModel"), _CROPPING, "vision_model.", skipped=1)
_CLIP_PROJECTED = replace(
    _CLIP,
    pooled=Family(
        _projected("CLIPVisionModelWithProjection", _VISION),
        _CROPPING,
        prefixes=WHOLE_MODEL,
        spec=functools.partial(_pooled_spec, output="image_embeds"),
    ),
)
_CLIP_TEXT = _text(_projected("CLIPTextModelWithProjection", _TEXT), WHOLE_MODEL, "text_embeds", "longest")
_DINOV2 = _family(
    hugging_face("dinov2", "Dinov2Model"), _tiles(IMAGENET, crops=True), "dinov2.", 1, _DINOV2_NAMES
)
_DINOV3 = _family(
    hugging_face("dinov3_vit", "DINOv3ViTModel"), _tiles(IMAGENET, crops=False), "", 1, _DINOV3_NAMES
)

FAMILIES = {
    "siglip": replace(_SIGLIP, text=_SIGLIP_TEXT),
    "siglip_vision_model": _SIGLIP,
    "siglip2": replace(_SIGLIP2, text=_SIGLIP2_TEXT),
    "siglip2_vision_model": _SIGLIP2,
    "clip": replace(_CLIP_PROJECTED, text=_CLIP_TEXT),
    "CLIPVisionModelWithProjection": _CLIP_PROJECTED,
    "clip_vision_model": _CLIP,
    "dinov2": _DINOV2,
    "dinov3_vit": _DINOV3,
}
