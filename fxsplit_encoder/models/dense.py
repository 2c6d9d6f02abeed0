"""SigLIP, CLIP and DINOv2: an image is one tile, and the tower needs no adapter of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fxsplit_encoder.models.eager import Inputs
from fxsplit_encoder.models.family import (
    Architecture,
    Build,
    Family,
    Prepare,
    Settings,
    hugging_face,
    stack,
)
from fxsplit_encoder.models.prepare import CLIP, HALF, IMAGENET, Normalization, ProcessorSettings
from fxsplit_encoder.models.tiles import ProcessedTiles, tile_side
from fxsplit_encoder.towers import DenseTowerSpec


def _prepare_siglip(settings: Settings, processor: ProcessorSettings) -> ProcessedTiles:
    """Images are stretched to squares."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    if processor.own is not None:
        return ProcessedTiles(processor.own)
    side = tile_side(settings, 224)
    statistics = HALF.updated(processor.image).as_settings()
    return ProcessedTiles(SiglipImageProcessorPil(size={"height": side, "width": side}, **statistics))


def _cropping(normalization: Normalization) -> Prepare:
    """CLIP's and DINOv2's: the square in an image's middle."""

    def read(settings: Settings, processor: ProcessorSettings) -> ProcessedTiles:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        if processor.own is not None:
            return ProcessedTiles(processor.own)
        side = tile_side(settings, 224)
        resized = (processor.image.get("size") or {}).get("shortest_edge", side)
        return ProcessedTiles(
            CLIPImageProcessorPil(
                size={"shortest_edge": max(resized, side)},
                crop_size={"height": side, "width": side},
                **normalization.updated(processor.image).as_settings(),
            )
        )

    return read


def _eager(tower: Any, mm_kwargs: Inputs, rows: slice) -> Tensor:
    features: Tensor = tower(mm_kwargs["pixel_values"]).last_hidden_state
    return features[:, rows].flatten(0, 1)


def _spec(tower: Any, rows: slice) -> DenseTowerSpec:
    config = tower.config
    tokens = (config.image_size // config.patch_size) ** 2
    shape = (config.num_channels, config.image_size, config.image_size)
    return DenseTowerSpec(shape, tokens, config.hidden_size, rows=rows)


def _family(build: Build, prepare: Prepare, rows: slice, prefix: str) -> Family:
    """A family; `rows`: those of a tile's output that are kept."""
    eager, spec = functools.partial(_eager, rows=rows), functools.partial(_spec, rows=rows)
    return Family(build, prepare, "tiles", eager, (prefix, ""), spec=spec)


_NO_CLASS_TOKEN = slice(1, None)
_SIGLIP = _family(
    hugging_face("siglip", "SiglipVisionModel", "SiglipVisionConfig"),
    _prepare_siglip,
    slice(None),
    "vision_model.",
)
_CLIP = _family(
    hugging_face("clip", "CLIPVisionModel", "CLIPVisionConfig"),
    _cropping(CLIP),
    _NO_CLASS_TOKEN,
    "vision_model.",
)
_DINOV2 = _family(
    hugging_face("dinov2", "Dinov2Model", "Dinov2Config"),
    _cropping(IMAGENET),
    _NO_CLASS_TOKEN,
    "dinov2.",
)

FAMILIES = {
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "dinov2": _DINOV2,
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
