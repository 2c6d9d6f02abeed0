"""InternVL: an image as a grid of equal tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from fxsplit_encoder.models.eager import PIXELS, Inputs, joined
from fxsplit_encoder.models.family import (
    WHOLE_MODEL,
    Architecture,
    Family,
    Settings,
    given,
    stack,
    text_config,
    text_width,
    vision_settings,
    without_language_model,
)
from fxsplit_encoder.models.prepare import (
    IMAGENET,
    Normalization,
    Preparation,
    Prepared,
    ProcessorSettings,
    frames_of,
)
from fxsplit_encoder.models.tiles import of_tiles, tile_side


def _build(settings: Settings) -> nn.Module:
    """`InternVLModel` without its language model."""
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    text = {"model_type": "qwen2", "intermediate_size": 8, "hidden_size": text_width(settings)}
    return without_language_model(
        "internvl",
        "InternVLModel",
        "InternVLConfig",
        {**text, **no_tokens},
        vision_config=vision_settings(settings),
        **given(settings, "downsample_ratio", "projector_hidden_act"),
        **given(settings, "vision_feature_layer", "vision_feature_select_strategy"),
    )


@dataclass(frozen=True)
class InternVLTiles(Preparation):
    """A grid of tiles whose shape is nearest to the image's, and after several the whole image as one more.

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

        side, normalization = tile_side(settings, 448), IMAGENET.updated(processor.image)
        if processor.own is not None:
            return cls(processor.own, side, normalization)
        made = GotOcr2ImageProcessorPil(
            size={"height": side, "width": side},
            crop_to_patches=True,
            min_patches=processor.image.get("min_patches", 1),
            max_patches=processor.image.get("max_patches", 12),
            **normalization.as_settings(),
        )
        return cls(made, side, normalization)

    def image(self, image: Image.Image) -> Prepared:
        """1 to 13 tiles."""
        # Its whole processor asks for crops, whatever the image processor's own settings are.
        outputs = self.processor(images=[image], crop_to_patches=True, return_tensors="pt")
        return of_tiles(outputs["pixel_values"])

    def clip(self, clip: Image.Image) -> list[Prepared]:
        """A tile per frame."""
        tiles = self.normalization(list(frames_of(clip, (self.side, self.side))))
        count = tiles.shape[0]
        tensors = {"pixel_values_videos": tiles, "video_num_patches": torch.tensor([count])}
        return [Prepared(tensors, {"tiles": count}, str(count), count)]


def _eager(model: Any, mm_kwargs: Inputs) -> Tensor:
    """A frame of a clip is a tile."""
    features: Tensor = model.get_image_features(joined(mm_kwargs, PIXELS), return_dict=True).pooler_output
    return features.flatten(0, 1)


_INTERNVL = Family(_build, InternVLTiles.read, "tiles", _eager, WHOLE_MODEL, is_apart=False)

FAMILIES = {"internvl": _INTERNVL}

_INTERNVIT_300M = stack("num_hidden_layers", attention_bias=True)
_INTERNVIT_6B = stack(
    "num_hidden_layers",
    hidden_size=3200,
    num_attention_heads=25,
    intermediate_size=12800,
    norm_type="rms_norm",
    use_qk_norm=True,
)

ARCHITECTURES = {
    "internvl3-8b": Architecture(
        "InternVL3-8B", "internvl", _INTERNVL, 24, _INTERNVIT_300M, text_config(3584)
    ),
    "internvl3-38b": Architecture(
        "InternVL3-38B", "internvl", _INTERNVL, 45, _INTERNVIT_6B, text_config(5120)
    ),
}
