"""A tiny real tower, its processor, and real images for it."""

from __future__ import annotations

import io
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.connector.interfaces import PreparedItem
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.models.media import TowerProcessor, family_processor
from fxsplit_encoder.models.prepare import OnDevice, ProcessorSettings
from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import FAMILIES

VISION = {
    "depth": 2,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 24,
    "deepstack_visual_indexes": [0],
}
WIDTH = 24
SETTINGS = {"model_type": "qwen3_vl", "vision_config": VISION}
IMAGES = Path(__file__).parents[2] / "examples" / "images"


def _module() -> Any:
    module = FAMILIES["qwen3_vl"].empty_tower(SETTINGS, torch.device("cpu"))
    draw_weights(module, 0)
    return module


@lru_cache
def tower() -> Any:
    """Wrapped, the same weights every time."""
    return FAMILIES["qwen3_vl"].wrap(_module())


_reference = lru_cache(_module)


@torch.no_grad()
def eager_rows(item: PreparedItem) -> Tensor:
    """What a tower that nobody wrapped makes of an item."""
    names = ("pixel_values", "image_grid_thw")
    if item.modality == "video":
        names = ("pixel_values_videos", "video_grid_thw")
    output = _reference()(*(item.inputs[name] for name in names))
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


def processor(*, normalize_later: bool = False, on_device: OnDevice = "normalize") -> TowerProcessor:
    """Images of 1 to 16 tokens, clips of a few more."""
    small = {"min_pixels": 32 * 32, "max_pixels": 128 * 128}
    return family_processor(
        tower(),
        FAMILIES["qwen3_vl"],
        SETTINGS,
        ProcessorSettings(image=small, video=small).on(on_device),
        hash_name="sha256",
        normalize_later=normalize_later,
    )


def manager() -> fx.EncoderCudaGraphManager:
    """Of the tower, which is traced once for all managers of a process."""
    made = _new_manager()
    made.paths["default"].bind(_program())
    return made


def encoder() -> ManagerEncoder:
    return ManagerEncoder(manager())


def _new_manager() -> fx.EncoderCudaGraphManager:
    config = fx.EncoderConfig(
        token_budgets=(4, 16, 64), max_items_per_batch=4, max_frames_per_batch=16, mode="full"
    )
    return fx.EncoderCudaGraphManager(tower(), config, log_interval=0)


@lru_cache
def _program() -> Any:
    tracing = _new_manager()
    tracing.compile()
    program = tracing.paths["default"].program
    assert program is not None, tracing.reports
    return program


@lru_cache
def _photographs() -> tuple[Image.Image, ...]:
    return tuple(Image.open(path).convert("RGB").resize((256, 256)) for path in sorted(IMAGES.glob("*.jpg")))


def crop(number: int) -> Image.Image:
    draw = random.Random(number)
    photograph = draw.choice(_photographs())
    width, height = draw.randrange(33, 140), draw.randrange(33, 140)
    left, top = draw.randrange(256 - width), draw.randrange(256 - height)
    return photograph.crop((left, top, left + width, top + height))


def jpeg(number: int) -> bytes:
    """The same, encoded."""
    buffer = io.BytesIO()
    crop(number).save(buffer, "JPEG")
    return buffer.getvalue()


def clip(number: int) -> list[Image.Image]:
    draw = random.Random(number)
    size = draw.choice([(64, 64), (96, 64)])
    return [crop(number * 100 + frame).resize(size) for frame in range(draw.choice([2, 4]))]
