"""DeepSeek-OCR tile by tile; its own forward is held to the model library's in another module."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.models.encoders.deepseek_encoder import DeepseekOcrConfig, DeepseekOcrVisionModel

from .random_weights import randomize
from .tiny_inputs import items
from .tiny_towers import tiny
from .tiny_views import deepseek_ocr_config

CONFIG = deepseek_ocr_config()


def make_model(config: DeepseekOcrConfig = CONFIG, seed: int = 5) -> DeepseekOcrVisionModel:
    model = randomize(DeepseekOcrVisionModel(config), seed)
    assert isinstance(model, DeepseekOcrVisionModel)
    return model


def make_inputs(
    crops: list[tuple[int, int]], seed: int = 0, config: DeepseekOcrConfig = CONFIG
) -> dict[str, Any]:
    """Of pages with so many columns and rows of crops."""
    known = tiny("DeepseekOcrVisionModel").inputs
    sizes = {"whole_size": config.base_size, "crop_size": config.image_size}
    return replace(known, **sizes).make(items("image", crops, seed))  # type: ignore[type-var, no-any-return]


def assemble(whole: Tensor, crops: Tensor, columns: int, newline: Tensor, separator: Tensor) -> Tensor:
    """An image's embedding, line by line, from (side, side, hidden) features; the crops come row by row."""
    rows = []
    for first in range(0, len(crops), columns or 1):
        for line in range(crops.shape[1]):
            rows += [*(crop[line] for crop in crops[first : first + columns]), newline[None]]
    for line in whole:
        rows += [line, newline[None]]
    return torch.cat([*rows, separator[None]])


@torch.no_grad()
def eager(model: DeepseekOcrVisionModel, inputs: dict[str, Any]) -> list[Tensor]:
    """Every image through the model, tile by tile."""
    crops = list(inputs["images_crop"])
    items = []
    for image, (columns, rows) in zip(
        inputs["pixel_values"], torch.as_tensor(inputs["images_spatial_crop"]).tolist(), strict=True
    ):
        count = columns * rows if columns * rows > 1 else 0
        own, crops = crops[:count], crops[count:]
        parts = [model(tile[None])[0] for tile in [image, *own]]
        whole, *tiles = (part.unflatten(0, (math.isqrt(part.shape[0]),) * 2) for part in parts)
        tiles_NHWC = torch.stack(tiles) if tiles else whole[:0, None]
        items.append(assemble(whole, tiles_NHWC, columns, model.image_newline, model.view_seperator))
    return items
