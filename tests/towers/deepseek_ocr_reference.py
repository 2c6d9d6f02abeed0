"""DeepSeek-OCR tile by tile; its own forward is held to the model library's in another module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.models.encoders.deepseek_encoder import DeepseekOcrConfig, DeepseekOcrVisionModel

from .random_weights import randomize
from .tiny_views import deepseek_ocr_config
from .two_views import Crops, Family

CONFIG = deepseek_ocr_config()


def make_model(config: DeepseekOcrConfig = CONFIG, seed: int = 5) -> DeepseekOcrVisionModel:
    model = randomize(DeepseekOcrVisionModel(config), seed)
    assert isinstance(model, DeepseekOcrVisionModel)
    return model


def make_inputs(crops: list[Crops], seed: int, config: DeepseekOcrConfig = CONFIG) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    count = sum(columns * rows for columns, rows in crops)
    grids = [grid if grid != (0, 0) else (1, 1) for grid in crops]
    return {
        "pixel_values": torch.randn(len(crops), 3, config.base_size, config.base_size, generator=generator),
        "images_crop": torch.randn(count, 3, config.image_size, config.image_size, generator=generator),
        "images_spatial_crop": torch.tensor(grids, dtype=torch.int64).view(-1, 2),
    }


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
    """Every image through a model of its own, tile by tile, with the weights that `model` has now."""
    fresh = DeepseekOcrVisionModel(model.config).train(False)
    fresh.load_state_dict(model.state_dict())
    crops = list(inputs["images_crop"])
    items = []
    for image, (columns, rows) in zip(
        inputs["pixel_values"], torch.as_tensor(inputs["images_spatial_crop"]).tolist(), strict=True
    ):
        count = columns * rows if columns * rows > 1 else 0
        own, crops = crops[:count], crops[count:]
        parts = [fresh(tile[None])[0] for tile in [image, *own]]
        whole, *tiles = (part.unflatten(0, (math.isqrt(part.shape[0]),) * 2) for part in parts)
        tiles_NHWC = torch.stack(tiles) if tiles else whole[:0, None]
        items.append(assemble(whole, tiles_NHWC, columns, fresh.image_newline, fresh.view_seperator))
    return items


def make_family(config: DeepseekOcrConfig) -> Family:
    model = make_model(config)
    return Family(
        fx.wrap(model),
        lambda crops, seed: make_inputs(crops, seed, config),
        lambda inputs: eager(model, inputs),
        lambda output: output,
    )
