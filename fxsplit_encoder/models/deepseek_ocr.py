"""DeepSeek-OCR: a page as a whole and, if it is large, as a grid of crops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import nn

from fxsplit_encoder.models.encoders.deepseek_encoder import (
    ClipConfig,
    DeepseekOcrConfig,
    DeepseekOcrVisionModel,
    SamConfig,
)
from fxsplit_encoder.models.family import (
    WHOLE_MODEL,
    Family,
    Settings,
    given,
    vision_settings,
)
from fxsplit_encoder.models.prepare import HALF, Normalization, Preparation, Prepared, ProcessorSettings
from fxsplit_encoder.models.tiles import Grid, crop_pixels, cut, view_sizes

_BICUBIC = Image.Resampling.BICUBIC
# Pixels a side: images up to it have no crops, and modes up to it that have no crops stretch images.
_SMALL = 640


def _build(settings: Settings) -> nn.Module:
    """Ours; config.json lists both encoders under `vision_config.width`.

    `base_size` and `image_size`, arguments of the published model's `infer`, are read besides
    `vision_config`, whose own `image_size` is the size that SAM's positions are stored for.
    """
    encoders = vision_settings(settings).get("width", {})
    clip, sam = encoders.get("clip-l-14-224", {}), encoders.get("sam_vit_b", {})
    channels = sam.get("downsample_channels", SamConfig.downsample_channels)
    projector = settings.get("projector_config", {})
    return DeepseekOcrVisionModel(
        DeepseekOcrConfig(
            **given(settings, "base_size", "image_size"),
            out_hidden_size=projector.get("n_embed", DeepseekOcrConfig.out_hidden_size),
            sam=SamConfig(
                **_transformer_sizes(sam),
                global_layers=tuple(sam.get("global_attn_indexes", SamConfig.global_layers)),
                downsample_channels=(channels[0], channels[1]),
            ),
            clip=ClipConfig(**_transformer_sizes(clip), **given(clip, "image_size", "patch_size")),
        )
    )


def _transformer_sizes(encoder: Settings) -> dict[str, Any]:
    names = {"num_hidden_layers": "layers", "num_attention_heads": "heads", "hidden_size": "width"}
    sizes = {own: encoder[name] for own, name in names.items() if name in encoder}
    # In both encoders an MLP is four times as wide as a block.
    return {**sizes, **({"intermediate_size": 4 * sizes["hidden_size"]} if "hidden_size" in sizes else {})}


@dataclass(frozen=True)
class DeepseekOcrViews(Preparation):
    """A page as a whole and, if it is large and the mode has crops, as 2 to 9 of them.

    The model's modes are two sizes; those with two equal ones have no crops. The whole page keeps its aspect
    ratio, on gray; small modes without crops stretch it.
    """

    whole: int
    crop: int
    max_crops: int
    normalization: Normalization

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> DeepseekOcrViews:
        """Those of the checkpoint's `base_size` and `image_size`; of the mode "Gundam" without."""
        whole = settings.get("base_size", DeepseekOcrConfig.base_size)
        crop = settings.get("image_size", DeepseekOcrConfig.image_size)
        return cls(whole, crop, 9, HALF.updated(processor.image))

    def image(self, image: Image.Image) -> Prepared:
        """Both views."""
        has_crops, size = self.crop != self.whole, (self.whole, self.whole)
        crops = deepseek_crops(image, self.crop, self.max_crops) if has_crops else []
        if has_crops or self.whole > _SMALL:
            gray = tuple(int(255 * mean) for mean in self.normalization.mean)
            whole = ImageOps.pad(image, size, _BICUBIC, color=gray)
        else:
            whole = image.resize(size, _BICUBIC)
        crop_values = crop_pixels(crops, self.crop, self.normalization)
        sizes = self.image_sizes(*image.size)
        return sizes.with_pixels(pixel_values=self.normalization([whole]), images_crop=crop_values)

    def image_sizes(self, width: int, height: int) -> Prepared:
        """Both views."""
        grid = (1, 1)
        if self.crop != self.whole:
            grid = deepseek_grid(width, height, self.crop, self.max_crops)
        return view_sizes(
            {"images_spatial_crop": torch.tensor([grid], device="cpu")},
            grid if grid[0] * grid[1] > 1 else (0, 0),
        )


def deepseek_grid(width: int, height: int, side: int, max_crops: int) -> Grid:
    """The grid of crops, as the model's own `infer` chooses it, which is InternVL's way; (1, 1), of none, for
    a small image, whatever `side`.
    """
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    if max(width, height) <= _SMALL:
        return 1, 1
    columns, rows = get_optimal_tiled_canvas((height, width), (side, side), 2, max_crops)
    return columns, rows


def deepseek_crops(image: Image.Image, side: int, max_crops: int) -> list[Image.Image]:
    """The crops of `deepseek_grid`, of the image stretched over them."""
    columns, rows = deepseek_grid(*image.size, side, max_crops)
    if columns * rows == 1:
        return []
    return list(cut(image.resize((columns * side, rows * side), _BICUBIC), side, side))


_DEEPSEEK_OCR = Family(_build, DeepseekOcrViews.read, "tiles", prefixes=WHOLE_MODEL)

# Its model type, deepseek_vl_v2, is also that of another model.
FAMILIES = {"DeepseekOCRForCausalLM": _DEEPSEEK_OCR}
