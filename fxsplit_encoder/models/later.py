"""Pixels that are normalized where they are encoded: as uint8 they are a quarter as large, and normalizing
them is most of the work of preparing an image.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fxsplit_encoder.connector.preparation import Inputs, Preparation
from fxsplit_encoder.connector.seams import Modality
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import Frames, MediaLimits, VideoFrames, open_video
from fxsplit_encoder.models.prepare import Normalization
from fxsplit_encoder.towers.inputs import PixelValues

logger = logging.getLogger(__name__)

# The second has to be resized, whatever the sides of patches.
_PROBES = ((160, 160), (150, 170))


def pixel_table(whole: Preparation, later: Preparation, modality: Modality) -> NDArray[np.float32] | None:
    """(channels, 256): what each value of each channel of uint8 pixels becomes.

    Args:
        whole: a model's preparation.
        later: the same of `ProcessorSettings.normalizing_later`.
        modality: image or video.

    Returns:
        None: that would not give the very values of the model's processor, as images of all colors show.
    """
    try:
        table = normalization_of(whole, modality).values()
        is_same = all(_are_equal(*_probed(whole, later, modality, size), table) for size in _PROBES)
    except (AttributeError, MediaError, TypeError, ValueError) as error:  # it does something else with pixels
        logger.info("%s pixels are normalized by the model's own processor: %s", modality, error)
        return None
    if not is_same:
        logger.info("%s pixels are normalized by the model's own processor: it gives other values", modality)
    return table if is_same else None


def normalization_of(preparation: Any, modality: Modality = "image") -> Normalization:
    """Of a preparation's images or clips: its own, its format's, or its processor's."""
    for holder in (preparation, getattr(preparation, f"{modality}_format", None)):
        own = getattr(holder, "normalization", None)
        if isinstance(own, Normalization):
            return own
    processor: Any = getattr(preparation, "processor", None)
    return Normalization(tuple(processor.image_mean), tuple(processor.image_std))


def _probed(
    whole: Preparation, later: Preparation, modality: Modality, size: tuple[int, int]
) -> tuple[list[Inputs], list[Inputs]]:
    image = _all_colors(*size)
    if modality == "image":
        return [whole.image(image)], [later.image(image)]
    return list(whole.clip(_frames(image))), list(later.clip(_frames(image)))


def _are_equal(whole: list[Inputs], later: list[Inputs], table: NDArray[np.float32]) -> bool:
    values = PixelValues(table, torch.float32, torch.device("cpu"))
    for now, then in zip(whole, later, strict=True):
        for name, given in now.tensors.items():
            pixels = then.tensors[name].byte()
            is_pixels = given.is_floating_point()
            if is_pixels and not (
                torch.equal(pixels, then.tensors[name]) and torch.equal(given, values(pixels))
            ):
                return False
    return True


def _all_colors(width: int, height: int) -> Image.Image:
    """Every value of every channel, each channel in another order."""
    ramp = np.arange(width * height) * 256 // (width * height)
    turned = ramp.reshape(width, height).T
    channels = [ramp.reshape(height, width), ramp[::-1].reshape(height, width), turned]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def _frames(image: Image.Image) -> Frames:
    video = open_video(VideoFrames([image, image.transpose(Image.Transpose.ROTATE_180)] * 2), MediaLimits())
    return video.select(range(4), MediaLimits())
