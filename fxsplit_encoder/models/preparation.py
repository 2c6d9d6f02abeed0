"""From a Pillow image or clip to the inputs of a tower: what every family's way has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.patches import normalize_pixels


@dataclass(frozen=True)
class ProcessorSettings:
    """What the JSON files of a checkpoint's image and video processors set; empty: nothing."""

    image: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """One item's inputs."""

    tensors: Mapping[str, Tensor]
    """By their key in `mm_kwargs`; those of several items are joined along the first dimension."""

    layout: Mapping[str, Any]
    """How it was cut, for the metadata of what is encoded: "grid", "tiles" or "crops"."""

    size: str
    """The same in few characters: patches, tiles, or whole views + crops."""

    frames: int = 0
    """Frames of a clip; 0: an image."""


class Preparation(ABC):
    """What a model's own processor does with an image, and with a clip if the model takes any."""

    takes_clips = False

    @abstractmethod
    def image(self, image: Image.Image) -> Prepared:
        """The inputs of an upright RGB image."""

    def clip(self, clip: Image.Image) -> list[Prepared]:
        """The inputs of an animated file: one item, or several of a few frames each.

        Raises:
            InputError: the model takes images only.
        """
        raise InputError("it is a clip, and this model takes images only; leave it out")


@dataclass(frozen=True)
class Normalization:
    """Subtracted from every channel, whose values are 0 to 1, and divided by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def updated(self, settings: Mapping[str, Any]) -> Normalization:
        """A copy with what a processor's JSON file sets."""
        mean, std = settings.get("image_mean"), settings.get("image_std")
        return Normalization(tuple(mean or self.mean), tuple(std or self.std))

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        """(images, 3, height, width) of images of one size."""
        pixels = np.stack([np.asarray(image) for image in images])
        return torch.from_numpy(np.ascontiguousarray(normalize_pixels(pixels, self.mean, self.std)))


HALF = Normalization((0.5,) * 3, (0.5,) * 3)
CLIP = Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def frames_of(clip: Image.Image, size: tuple[int, int]) -> Iterator[Image.Image]:
    """The frames of an animated file, each resized to (width, height)."""
    for frame in ImageSequence.Iterator(clip):
        yield frame.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def join(prepared: Iterable[Prepared]) -> dict[str, Tensor]:
    """The tensors of several items as `mm_kwargs`."""
    parts: dict[str, list[Tensor]] = {}
    for item in prepared:
        for name, tensor in item.tensors.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
