"""SigLIP, SigLIP 2, CLIP, DINOv2 and DINOv3: an image is one tile, and the models have a vector of it.

SigLIP and CLIP have a text tower too, whose vectors are comparable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from PIL import Image
from torch import Tensor, nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Renames
from fxsplit_encoder.models.family import (
    WHOLE_MODEL,
    Architecture,
    Build,
    Family,
    Prepare,
    Settings,
    TextTower,
    hugging_face,
    stack,
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
from fxsplit_encoder.models.tiles import ProcessedTiles, tile_side, tile_sizes
from fxsplit_encoder.towers import DenseTowerSpec
from fxsplit_encoder.towers.siglip2 import Siglip2Tower, places_of


def _stretching(normalization: Normalization) -> Prepare:
    """SigLIP's and DINOv3's: images are stretched to squares."""

    def read(settings: Settings, processor: ProcessorSettings) -> ProcessedTiles:
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        if processor.own is not None:
            return ProcessedTiles(processor.own)
        given = processor.image.get("size") or {}
        side = given.get("height", tile_side(settings, 224))
        statistics = normalization.updated(processor.image).as_settings()
        resample = {name: processor.image[name] for name in ("resample",) if name in processor.image}
        size = {"height": side, "width": side}
        return ProcessedTiles(SiglipImageProcessorPil(size=size, **statistics, **resample))

    return read


def _cropping(normalization: Normalization) -> Prepare:
    """CLIP's and DINOv2's: the square in an image's middle."""

    def read(settings: Settings, processor: ProcessorSettings) -> ProcessedTiles:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        if processor.own is not None:
            return ProcessedTiles(processor.own)
        cropped = (processor.image.get("crop_size") or {}).get("height")
        side = cropped or tile_side(settings, 224)
        resized = (processor.image.get("size") or {}).get("shortest_edge", side)
        return ProcessedTiles(
            CLIPImageProcessorPil(
                size={"shortest_edge": max(resized, side)},
                crop_size={"height": side, "width": side},
                **normalization.updated(processor.image).as_settings(),
            )
        )

    return read


@dataclass(frozen=True)
class SizedPatches(Preparation):
    """SigLIP 2's images of their own aspect ratio as `Siglip2Tower` takes them: patches, places, a mask."""

    processor: Any
    patches: int
    """To which an image is padded."""

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> SizedPatches:
        """By the model's processor, with as many patches as its table of positions."""
        from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

        vision = vision_settings(settings)
        statistics = HALF.updated(processor.image).as_settings()
        own = processor.own or Siglip2ImageProcessorPil(patch_size=vision.get("patch_size", 16), **statistics)
        return cls(own, vision.get("num_patches", 256))

    def image(self, image: Image.Image) -> Prepared:
        """One tile, (1, patches, features and places)."""
        made = processed(self.processor, image, max_num_patches=self.patches)
        shape = made["spatial_shapes"][0].tolist()
        places = places_of(shape[0], shape[1], self.patches)
        columns = made["pixel_values"][0], places, made["pixel_attention_mask"][0][:, None]
        tile = torch.cat([column.float() for column in columns], dim=-1)
        return self._sizes(shape[0], shape[1]).with_pixels(pixel_values=tile[None, None])

    def image_sizes(self, width: int, height: int) -> Prepared:
        """One tile, and the grid of its patches."""
        from transformers.models.siglip2.image_processing_pil_siglip2 import (
            get_image_size_for_max_num_patches,
        )

        side = self.processor.patch_size
        sides = get_image_size_for_max_num_patches(height, width, side, self.patches)
        return self._sizes(sides[0] // side, sides[1] // side)

    def _sizes(self, rows: int, columns: int) -> Prepared:
        layout = {"grid": (1, rows, columns)}
        return replace(tile_sizes(1), layout=layout, size=str(rows * columns))


def _spec(tower: Any, side: int | None, skipped: int) -> DenseTowerSpec:
    """Declares the last hidden state, without class and register tokens."""
    config = tower.config
    side = side or config.image_size
    shape = (config.num_channels, side, side)
    tokens = (side // config.patch_size) ** 2
    rows = slice(skipped + getattr(config, "num_register_tokens", 0), None)
    return DenseTowerSpec(shape, tokens, config.hidden_size, rows=rows)


def _pooled_spec(tower: Any, side: int | None, output: str) -> DenseTowerSpec:
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
    spec = functools.partial(_spec, skipped=skipped)
    pooled = _pooled(build, prepare, (prefix, ""), renames=renames)
    return Family(build, prepare, "tiles", None, (prefix, ""), renames, spec, pooled=pooled)


def _pooled(
    build: Build,
    prepare: Prepare,
    prefixes: tuple[str, ...],
    output: str = "pooler_output",
    renames: Renames = (),
) -> Family:
    """The same tower with the head that makes one vector."""
    spec = functools.partial(_pooled_spec, output=output)
    return Family(build, prepare, "tiles", None, prefixes, renames, spec)


def _projected(tower: str, config: str, part: str) -> Build:
    """A tower of CLIP with the projection after it, whose width the whole model's settings hold."""
    build = hugging_face("clip", tower, config, part)

    def with_width(settings: Settings) -> nn.Module:
        own = settings.get(part, settings)
        width = settings.get("projection_dim", own.get("projection_dim", 512))
        return build({part: {**own, "projection_dim": width}})

    return with_width


def _siglip2(pooled_alone: bool, pooled: Family | None = None) -> Family:
    def adapter(tower: Any) -> Siglip2Tower:
        return Siglip2Tower(tower, tower.config.num_patches, pooled_alone=pooled_alone)

    return Family(
        hugging_face("siglip2", "Siglip2VisionModel", "Siglip2VisionConfig"),
        SizedPatches.read,
        "tiles",
        prefixes=("vision_model.", ""),
        adapter=adapter,
        pooled=pooled,
        pads_rows=not pooled_alone,
    )


def _text(build: Build, prefixes: tuple[str, ...], output: str, padding: str) -> TextTower:
    return TextTower(Family(build, _no_images, "tokens", prefixes=prefixes), output, padding)


def _no_images(settings: Settings, processor: ProcessorSettings) -> NoReturn:
    raise InputError("a text tower takes no images")


_TEXT, _VISION = "text_config", "vision_config"
_DINOV2_NAMES: Renames = (
    (r"\.attention\.attention\.([qkv])[a-z]+\.", r".attention.\1_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
)
_DINOV3_NAMES: Renames = ((r"^layer\.", "model.layer."),)
_STRETCHING, _CROPPING = _stretching(HALF), _cropping(CLIP)

_SIGLIP = _family(
    hugging_face("siglip", "SiglipVisionModel", "SiglipVisionConfig"), _STRETCHING, "vision_model."
)
_SIGLIP_TEXT, _SIGLIP2_TEXT = (
    _text(
        hugging_face(module, f"{name}TextModel", f"{name}TextConfig", _TEXT),
        ("text_model.", ""),
        "pooler_output",
        "max_length",
    )
    for module, name in (("siglip", "Siglip"), ("siglip2", "Siglip2"))
)
_SIGLIP2 = _siglip2(False, _siglip2(True))
_CLIP = _family(
    hugging_face("clip", "CLIPVisionModel", "CLIPVisionConfig"), _CROPPING, "vision_model.", skipped=1
)
_CLIP_PROJECTED = replace(
    _CLIP,
    pooled=_pooled(
        _projected("CLIPVisionModelWithProjection", "CLIPVisionConfig", _VISION),
        _CROPPING,
        WHOLE_MODEL,
        "image_embeds",
    ),
)
_CLIP_TEXT = _text(
    _projected("CLIPTextModelWithProjection", "CLIPTextConfig", _TEXT), WHOLE_MODEL, "text_embeds", "longest"
)
_DINOV2 = _family(
    hugging_face("dinov2", "Dinov2Model", "Dinov2Config"), _cropping(IMAGENET), "dinov2.", 1, _DINOV2_NAMES
)
_DINOV3 = _family(
    hugging_face("dinov3_vit", "DINOv3ViTModel", "DINOv3ViTConfig"),
    _stretching(IMAGENET),
    "",
    1,
    _DINOV3_NAMES,
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


def _vision(hidden_size: int, image_size: int, **settings: int) -> Callable[[int], dict[str, Any]]:
    sizes = {"hidden_size": hidden_size, "num_attention_heads": 16, "patch_size": 14}
    return stack("num_hidden_layers", **sizes, image_size=image_size, **settings)


ARCHITECTURES = {
    "siglip-so400m-384": Architecture(
        "SigLIP-SO400M-384", "siglip_vision_model", _SIGLIP, 27, _vision(1152, 384, intermediate_size=4304)
    ),
    "clip-l-336": Architecture(
        "CLIP-L-336", "clip_vision_model", _CLIP, 24, _vision(1024, 336, intermediate_size=4096)
    ),
    "dinov2-l-518": Architecture("DINOv2-L-518", "dinov2", _DINOV2, 24, _vision(1024, 518)),
}
