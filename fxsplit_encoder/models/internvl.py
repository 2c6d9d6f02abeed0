"""InternVL: an image as a grid of equal tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fxsplit_encoder.media import Frames
from fxsplit_encoder.media.images import bicubic
from fxsplit_encoder.models.eager import PIXELS, Inputs, joined
from fxsplit_encoder.models.family import (
    WHOLE_MODEL,
    Family,
    Settings,
    given,
    text_width,
    vision_settings,
    without_language_model,
)
from fxsplit_encoder.models.prepare import IMAGENET, Normalization, Prepared, ProcessorSettings
from fxsplit_encoder.models.sampling import Sampling, middle_of_equal_parts
from fxsplit_encoder.models.tiles import (
    MOST_TILES,
    ProcessedTiles,
    frame_sizes,
    tile_side,
)
from fxsplit_encoder.towers.base import VIDEOS


def _build(settings: Settings) -> nn.Module:
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
        tiles = self.normalization([bicubic(frame, (self.side, self.side)) for frame in frames])
        return [frame_sizes(len(frames)).with_pixels(**{VIDEOS: tiles})]

    def clip_sizes(self, num_frames: int, width: int, height: int) -> list[Prepared]:
        """A tile per frame."""
        return [frame_sizes(num_frames)]


def _eager(model: Any, mm_kwargs: Inputs) -> Tensor:
    """A frame of a clip is a tile."""
    features: Tensor = model.get_image_features(joined(mm_kwargs, PIXELS), return_dict=True).pooler_output
    return features.flatten(0, 1)


_INTERNVL = Family(_build, InternVLTiles.read, "tiles", _eager, WHOLE_MODEL)

FAMILIES = {"internvl": _INTERNVL}
