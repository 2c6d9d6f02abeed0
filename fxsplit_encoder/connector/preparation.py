"""What a model's own processor does, as the connector uses it. Families have theirs in `models`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from PIL import Image

from fxsplit_encoder.connector.seams import Modality
from fxsplit_encoder.media import Frames


class Inputs(Protocol):
    """What a preparation makes of one item of the tower."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By their key in `mm_kwargs`; without pixels where only sizes were asked for."""

    @property
    def layout(self) -> Mapping[str, Any]:
        """How it was cut: "grid", "tiles" or "crops"."""


class Preparation(Protocol):
    """What a model's own processor does, with one item's arguments."""

    @property
    def takes_clips(self) -> bool:
        """Whether the model takes videos."""

    @property
    def image_options(self) -> Mapping[str, int]:
        """The arguments that an image may have, integers from 1, and the most that each may be."""

    @property
    def clip_options(self) -> Mapping[str, int]:
        """The arguments that a video may have besides those of sampling, in the same way."""

    @property
    def frames_per_step(self) -> int:
        """Frames that become one along a video's grid."""

    def image(self, image: Image.Image) -> Inputs:
        """The inputs of an upright RGB image."""

    def image_sizes(self, width: int, height: int) -> Inputs:
        """The same of an image of this size, without pixels."""

    def sample(self, num_frames: int, fps: float | None) -> Sequence[int]:
        """Which frames of a video are seen."""

    def clip(self, frames: Frames) -> Sequence[Inputs]:
        """The inputs of a video: one item of the tower, or several."""

    def clip_sizes(self, num_frames: int, width: int, height: int) -> Sequence[Inputs]:
        """The same of a video of this size, without pixels."""


Prepare = Callable[[Modality, Mapping[str, object]], Preparation]
"""A preparation for an item's modality and options."""
