"""Families that see an image as a whole and, if it is large, as crops: DeepSeek-OCR, Step3 and Step-3.7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from fxsplit_encoder.models.checkpoint import Renames
from fxsplit_encoder.models.eager import Inputs
from fxsplit_encoder.models.encoders.deepseek_encoder import (
    ClipConfig,
    DeepseekOcrConfig,
    DeepseekOcrVisionModel,
    SamConfig,
)
from fxsplit_encoder.models.encoders.step3_vision import Step3VisionConfig, Step3VisionModel
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
from fxsplit_encoder.models.prepare import CLIP, HALF, Normalization, Preparation, Prepared, ProcessorSettings
from fxsplit_encoder.models.tiles import check_enlarged, cut, tile_side
from fxsplit_encoder.towers.tiles import CropGrid


def crop_pixels(crops: list[Image.Image], side: int, normalization: Normalization) -> Tensor:
    """(crops, 3, side, side), of no crops too."""
    return normalization(crops) if crops else torch.zeros(0, 3, side, side, dtype=torch.float32, device="cpu")


# --- DeepSeek-OCR

_BICUBIC = Image.Resampling.BICUBIC
# Pixels a side: images up to it have no crops, and modes up to it that have no crops stretch images.
_SMALL = 640
_MOST_CROPS = 9


def _build_deepseek_ocr(settings: Settings) -> nn.Module:
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
    normalization: Normalization

    @classmethod
    def read(cls, settings: Settings, processor: ProcessorSettings) -> DeepseekOcrViews:
        """Those of the checkpoint's `base_size` and `image_size`; of the mode "Gundam" without."""
        whole = settings.get("base_size", DeepseekOcrConfig.base_size)
        crop = settings.get("image_size", DeepseekOcrConfig.image_size)
        return cls(whole, crop, HALF.updated(processor.image))

    def image(self, image: Image.Image) -> Prepared:
        """Both views; the image is stretched over the crops."""
        size, (columns, rows) = (self.whole, self.whole), self._grid(*image.size)
        crops: list[Image.Image] = []
        if columns * rows > 1:
            stretched = image.resize((columns * self.crop, rows * self.crop), _BICUBIC)
            crops = list(cut(stretched, self.crop, self.crop))
        if self.crop != self.whole or self.whole > _SMALL:
            gray = tuple(int(255 * mean) for mean in self.normalization.mean)
            whole = ImageOps.pad(image, size, _BICUBIC, color=gray)
        else:
            whole = image.resize(size, _BICUBIC)
        crop_values = crop_pixels(crops, self.crop, self.normalization)
        sizes = self.image_sizes(*image.size)
        return sizes.with_pixels(pixel_values=self.normalization([whole]), images_crop=crop_values)

    def image_sizes(self, width: int, height: int) -> Prepared:
        """Both views."""
        grid = self._grid(width, height)
        crops = {"crops": grid if grid[0] * grid[1] > 1 else (0, 0)}
        return Prepared({"images_spatial_crop": torch.tensor([grid], device="cpu")}, crops)

    def _grid(self, width: int, height: int) -> CropGrid:
        """The grid of crops, as the model's own `infer` chooses it, which is InternVL's way; (1, 1), of none,
        for a small image, whatever their size, and in a mode without crops.
        """
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

        if self.crop == self.whole or max(width, height) <= _SMALL:
            return 1, 1
        columns, rows = get_optimal_tiled_canvas((height, width), (self.crop, self.crop), 2, _MOST_CROPS)
        return columns, rows


# --- Step3 and Step-3.7

_BILINEAR = Image.Resampling.BILINEAR
_LARGEST_SIDE = 3024

# After the prefix of the vision model, if the checkpoint is that of the whole model.
_STEP3P7_NAMES: Renames = (
    (r"^vit_large_projector\.", "multi_modal_projector."),
    (r"(^|\.)conv1\.weight$", r"\1embeddings.patch_embedding.weight"),
    (r"(^|\.)positional_embedding$", r"\1embeddings.position_embedding.weight"),
    (r"(^|\.)transformer\.resblocks\.", r"\1layers."),
    (r"(^|\.)ln_pre\.", r"\1pre_layernorm."),
    (r"(^|\.)vit_downsampler([12])\.", r"\1downsampler\2."),
    (r"\.ls_([12])\.gamma$", r".lambda_\1"),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.attn\.in_proj_", ".self_attn.qkv."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ln_1\.", ".layernorm_before."),
    (r"\.ln_2\.", ".layernorm_after."),
)


def _build_step3(settings: Settings) -> nn.Module:
    """Ours; config.json has the names of the encoder's configuration in serving engines."""
    sizes = given(vision_settings(settings), *Step3VisionConfig.__dataclass_fields__)
    own = {**sizes, **given(settings, "projector_bias"), "out_hidden_size": text_width(settings)}
    return Step3VisionModel(Step3VisionConfig(**own))


def _build_step3p7(settings: Settings) -> nn.Module:
    """`Step3p7Model` without its language model."""
    narrow = {"intermediate_size": 8, "head_dim": 8, "moe_layers_enum": [], "pad_token_id": 0}
    return without_language_model(
        "step3p7",
        "Step3p7Model",
        {**narrow, "hidden_size": text_width(settings)},
        vision_config=vision_settings(settings),
        **given(settings, "projector_bias"),
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
            side = tile_side(settings, 728)
            return cls(side, 504, (crops, count), CLIP.updated(processor.image))

        return read

    def image(self, image: Image.Image) -> Prepared:
        """Both views."""
        plan = step3_plan(*image.size, self.whole, self.crop)
        if plan.square:
            canvas = Image.new("RGB", (max(image.size),) * 2)
            canvas.paste(image)
            image = canvas
        whole = image.resize(plan.size, _BILINEAR).resize((self.whole, self.whole), _BILINEAR)
        crops: list[Image.Image] = []
        if plan.window:
            cropped = image.resize(plan.crop_size, _BILINEAR)
            width, height = (min(plan.window, side) for side in plan.crop_size)
            crops = [each.resize((self.crop, self.crop), _BILINEAR) for each in cut(cropped, width, height)]
        pixels = {self.names[0]: crop_pixels(crops, self.crop, self.normalization)}
        return self._sizes(plan).with_pixels(pixel_values=self.normalization([whole]), **pixels)

    def image_sizes(self, width: int, height: int) -> Prepared:
        """Both views."""
        return self._sizes(step3_plan(width, height, self.whole, self.crop))

    def _sizes(self, plan: Step3Plan) -> Prepared:
        columns, rows = plan.grid
        count = torch.tensor([columns * rows], device="cpu")
        return Prepared({self.names[1]: count}, {"crops": (columns, rows)})


# As transformers' Step3p7ImageProcessor, which needs torchvision, does it.


@dataclass(frozen=True)
class Step3Plan:
    """Crops of an image."""

    square: bool
    """Whether it is put on a black square first: a strip under 32 pixels."""
    size: tuple[int, int]
    """Width and height to which it is then resized."""
    crop_size: tuple[int, int]
    """Width and height to which it is resized before it is cut."""
    window: int
    """Side of a crop in pixels; 0: there are none."""

    @property
    def grid(self) -> CropGrid:
        """Rows and columns of crops; (0, 0) without any. A side shorter than a crop is one crop."""
        if not self.window:
            return 0, 0
        columns, rows = (side // min(self.window, side) for side in self.crop_size)
        return columns, rows


def step3_plan(width: int, height: int, image_size: int, crop_size: int) -> Step3Plan:
    """Images that the whole view holds have crops only if they are elongated; crops cover the image without
    overlap, and a remainder of less than a fifth of a crop is squeezed in.
    """
    square = min(width, height) < 32 and max(width, height) > 4 * min(width, height)
    if square:
        width = height = max(width, height)
        check_enlarged(width, height)
    if max(width, height) > _LARGEST_SIDE:
        scale = _LARGEST_SIDE / max(width, height)
        width, height = int(width * scale), int(height * scale)
    short, long = sorted((width, height))
    if long <= image_size:
        window = short if long / short > 1.5 else 0
    else:
        window = min(short, crop_size) if long / short > 4 else crop_size
    if not window:
        return Step3Plan(square, (width, height), (width, height), 0)
    across, down = (
        window * (side // window + (side % window > 0.2 * window)) if side >= window else side
        for side in (width, height)
    )
    return Step3Plan(square, (width, height), (across, down), window)


def _eager_step3p7(model: Any, mm_kwargs: Inputs) -> Tensor:
    """A bare tower has no method for both views."""
    counts = mm_kwargs["num_local_patches"].tolist()
    crops = mm_kwargs["pixel_values_local"] if sum(counts) else None
    if hasattr(model, "get_image_features"):
        merged = model.get_image_features(mm_kwargs["pixel_values"], crops, counts, return_dict=True)
        return torch.cat(merged.pooler_output)
    whole = model(mm_kwargs["pixel_values"]).last_hidden_state
    parts = iter(model(crops).last_hidden_state if crops is not None else ())
    rows = [[next(parts) for _ in range(n)] + [image] for n, image in zip(counts, whole, strict=True)]
    return torch.cat([row for image in rows for row in image])


_STEP3P7_VIEWS = Step3Views.reader("pixel_values_local", "num_local_patches")

FAMILIES = {
    # Its model type, deepseek_vl_v2, is also that of another model.
    "DeepseekOCRForCausalLM": Family(_build_deepseek_ocr, DeepseekOcrViews.read, prefixes=WHOLE_MODEL),
    "step3_vl": Family(
        _build_step3, Step3Views.reader("patch_pixel_values", "num_patches"), prefixes=WHOLE_MODEL
    ),
    "step3p7": Family(_build_step3p7, _STEP3P7_VIEWS, _eager_step3p7, WHOLE_MODEL, renames=_STEP3P7_NAMES),
    "step3p5_vision": Family(
        hugging_face("step3p7", "Step3p7VisionModel"),
        _STEP3P7_VIEWS,
        _eager_step3p7,
        renames=_STEP3P7_NAMES,
    ),
}
