"""The Qwen line and GLM-4V: images and clips as patches in blocks of those that merge, frames in pairs.

They are cut with the arithmetic of the models' processors, without torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fxsplit_encoder.media import Frames
from fxsplit_encoder.media.images import ResizePlan, bicubic
from fxsplit_encoder.media.sources import attempt
from fxsplit_encoder.models.eager import GRIDS, PIXELS, Inputs, joined
from fxsplit_encoder.models.family import VISUAL, Family, Prepare, Settings, hugging_face, vision_settings
from fxsplit_encoder.models.prepare import (
    CLIP,
    HALF,
    Normalization,
    Preparation,
    Prepared,
    ProcessorSettings,
    processed,
)
from fxsplit_encoder.models.sampling import (
    Rule,
    Sampling,
    by_length,
    by_seconds,
    first_of_equal_parts,
    first_to_last,
    whole_steps_of_equal_parts,
)
from fxsplit_encoder.towers.grid import Grid

MOST_PIXELS = 1 << 31


@dataclass(frozen=True)
class PatchFormat:
    """Rules by which a processor resizes, normalizes and cuts images."""

    min_pixels: int
    """Smaller inputs are enlarged to this. Of a video it counts all frames together, or each of them."""

    max_pixels: int
    """Larger inputs are shrunk to this."""

    patch_size: int = 16
    """Side of a patch in pixels."""

    merge_size: int = 2
    """Patches that become one output token along each side."""

    temporal_patch_size: int = 2
    """Frames that become one."""

    normalization: Normalization = HALF

    limits_each_frame: bool = False
    """Whether the limits of pixels hold for each frame of a video, as in Qwen2-VL, or for all together."""

    cap_pixels_per_frame: bool = False
    """Whether a frame is limited to its share of `max_video_tokens`, as in qwen-vl-utils, too."""

    max_video_tokens: int = 768
    """Tokens of the whole video with `limits_each_frame`, else of one frame."""

    @property
    def factor(self) -> int:
        """Side of an output token in pixels; height and width become multiples of it."""
        return self.patch_size * self.merge_size

    def updated(self, settings: Mapping[str, Any]) -> PatchFormat:
        """A copy with what a processor's JSON file sets, under the processor's names."""
        size = settings.get("size") or {}
        changes: dict[str, Any] = {
            **{each.name: settings.get(each.name) for each in fields(self)},
            "min_pixels": settings.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": settings.get("max_pixels") or size.get("longest_edge"),
            "normalization": self.normalization.updated(settings),
        }
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def patches(self, frames: Iterable[Image.Image], grid: Grid) -> Tensor:
        """The patches of an image or of a clip's frames on a grid."""
        sizes = self.patch_size, self.normalization, self.merge_size, self.temporal_patch_size
        return patchify(frames, grid, *sizes)


# Published Qwen3-VL checkpoints enlarge images to 65536 pixels; without a checkpoint small ones stay small.
IMAGE_FORMAT = PatchFormat(min_pixels=56 * 56, max_pixels=16_777_216)
VIDEO_FORMAT = PatchFormat(min_pixels=4096, max_pixels=25_165_824)
FRAME_FORMAT = PatchFormat(
    min_pixels=56 * 56, max_pixels=28 * 28 * 768, limits_each_frame=True, max_video_tokens=128_000
)
"""Of videos, where each frame has limits."""


@dataclass(frozen=True)
class BlockPatches(Preparation):
    """Patches in blocks of those that merge, frames in pairs: the Qwen line and GLM.

    Images go through the checkpoint's own image processor if there is one.
    """

    image_format: PatchFormat
    video_format: PatchFormat
    sampling: Sampling = field(default_factory=lambda: Sampling(first_of_equal_parts))
    images_are_clips: bool = False
    """Whether an image has the size of a clip of `temporal_patch_size` equal frames, as in GLM-4V."""
    own: Any = None
    """The checkpoint's own image processor; None: there is none."""
    takes_clips = True
    image_options: ClassVar[Mapping[str, int]] = {"min_pixels": MOST_PIXELS, "max_pixels": MOST_PIXELS}
    clip_options: ClassVar[Mapping[str, int]] = image_options

    @property
    def frames_per_step(self) -> int:  # type: ignore[override]
        """Frames of a clip that become one along its grid."""
        return self.video_format.temporal_patch_size

    @classmethod
    def reader(
        cls,
        patch_size: int,
        normalization: Normalization,
        rule: Rule,
        *,
        video: PatchFormat = VIDEO_FORMAT,
        images_are_clips: bool = False,
    ) -> Callable[[Settings, ProcessorSettings], BlockPatches]:
        """From the model's and its processors' settings; the arguments are what they may leave out."""

        def read(settings: Settings, processor: ProcessorSettings) -> BlockPatches:
            own = vision_settings(settings).get("patch_size", patch_size)
            image_format, video_format = (
                replace(form, patch_size=own, normalization=normalization).updated(given)
                for form, given in ((IMAGE_FORMAT, processor.image), (video, processor.video))
            )
            sampling = Sampling(rule).updated(processor.video)
            return cls(image_format, video_format, sampling, images_are_clips, processor.own)

        return read

    def image(self, image: Image.Image) -> Prepared:
        """By the checkpoint's own image processor, or with its arithmetic."""
        sizes = self.image_sizes(*image.size)  # before the processor, whose message says less
        if self.own is None:
            return sizes.with_pixels(pixel_values=self.image_format.patches([image], sizes.layout["grid"]))
        outputs = processed(self.own, image)
        t, h, w = outputs["image_grid_thw"][0].tolist()
        return of_grid("image_grid_thw", (t, h, w)).with_pixels(pixel_values=outputs["pixel_values"])

    def image_sizes(self, width: int, height: int) -> Prepared:
        """A grid of one frame."""
        form = self.image_format
        if self.images_are_clips:
            rows, columns = video_frame_size(form.temporal_patch_size, height, width, form)
        else:
            rows, columns = image_size(height, width, form)
        return of_grid("image_grid_thw", (1, rows // form.patch_size, columns // form.patch_size))

    def plan(self, width: int, height: int) -> ResizePlan | None:
        """Patches of as many equal frames as a step has."""
        form = self.image_format
        _, rows, columns = self.image_sizes(width, height).layout["grid"]
        sides = rows * form.patch_size, columns * form.patch_size
        return ResizePlan(
            *sides, rows, columns, form.patch_size, form.merge_size, frames=form.temporal_patch_size
        )

    def clip(self, frames: Frames) -> list[Prepared]:
        """One item of all frames."""
        (sizes,) = self.clip_sizes(len(frames), *frames.size)
        patches = self.video_format.patches(frames, sizes.layout["grid"])
        return [sizes.with_pixels(pixel_values_videos=patches)]

    def clip_sizes(self, num_frames: int, width: int, height: int) -> list[Prepared]:
        """One item of all frames."""
        form = self.video_format
        rows, columns = video_frame_size(num_frames, height, width, form)
        steps = -(-num_frames // form.temporal_patch_size)
        grid = steps, rows // form.patch_size, columns // form.patch_size
        return [of_grid("video_grid_thw", grid, num_frames)]


def of_grid(key: str, grid: Grid, frames: int = 0) -> Prepared:
    """The sizes of an item of patches."""
    return Prepared({key: torch.tensor([grid], device="cpu")}, {"grid": grid}, frames)


def image_size(height: int, width: int, form: PatchFormat) -> tuple[int, int]:
    """Height and width to which an image is resized.

    Raises:
        MediaError: one side is over 200 times the other.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    with attempt(f"{width} x {height} pixels", "an image"):
        sides: tuple[int, int] = smart_resize(height, width, form.factor, form.min_pixels, form.max_pixels)
    return sides


def video_frame_size(num_frames: int, height: int, width: int, form: PatchFormat) -> tuple[int, int]:
    """Height and width to which every frame of a video is resized.

    Raises:
        MediaError: one side is over 200 times the other.
    """
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    if form.limits_each_frame:
        return image_size(height, width, replace(form, max_pixels=_most_of_a_frame(num_frames, form)))
    temporal, max_pixels = form.temporal_patch_size, form.max_pixels
    if form.cap_pixels_per_frame:
        max_pixels = _most_of_a_frame(num_frames, form) * num_frames
    frames = max(num_frames, temporal)  # the last is repeated
    with attempt(f"{width} x {height} pixels", "frames"):
        sides: tuple[int, int] = smart_resize(
            frames, height, width, temporal, form.factor, form.min_pixels, max_pixels
        )
    return sides


def _most_of_a_frame(num_frames: int, form: PatchFormat) -> int:
    """Pixels of one frame, by the rules of transformers' Qwen2-VL and Qwen3-VL video processors."""
    if not form.cap_pixels_per_frame:
        return form.max_pixels
    tokens = form.max_video_tokens * form.factor**2
    if form.limits_each_frame:
        most = min(form.max_pixels, int(tokens * 0.9) * form.temporal_patch_size // num_frames)
    else:
        most = min(form.max_pixels // num_frames, tokens)
    return max(most, int(form.min_pixels * 1.05))


def patchify(
    frames: Iterable[Image.Image],
    grid: Grid,
    patch: int,
    normalization: Normalization,
    merge: int = 1,
    temporal: int = 1,
) -> Tensor:
    """Resize frames to the size of a grid, and cut them into patches.

    Args:
        frames: of the grid's steps; where the last step lacks some, its last frame is repeated.
        grid: (steps, height, width) in patches.
        patch: side of a patch in pixels.
        normalization: of their pixels.
        merge: side in patches of the blocks by which they go within a frame; 1: row by row.
        temporal: frames of a step.

    Returns:
        (t * h * w, 3 * temporal * patch * patch).
    """
    steps, height, width = grid
    rows, columns = height // merge, width // merge
    made = np.empty((steps, rows, columns, merge, merge, 3, temporal, patch, patch), np.uint8)
    for number, frame in enumerate(frames):
        pixels = np.asarray(bicubic(frame, (width * patch, height * patch)))
        split = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
        last = number % temporal
        # (h, mh, ph, w, mw, pw, C) -> (h, w, mh, mw, C, ph, pw)
        made[number // temporal, ..., last, :, :] = split.transpose(0, 3, 1, 4, 6, 2, 5)
    made[-1, ..., last + 1 :, :, :] = made[-1, ..., last : last + 1, :, :]
    return normalization.of_channels(made.reshape(math.prod(grid), 3, -1)).flatten(1)


def block_eager(tower: Any, mm_kwargs: Inputs) -> Tensor:
    """The Qwen line and GLM: the main output, then the deepstack levels, along the hidden dimension."""
    pixels, grids = joined(mm_kwargs, PIXELS), joined(mm_kwargs, GRIDS)
    # To these towers a video is images, one per frame; GLM's takes nothing else.
    frames = torch.tensor([(1, h, w) for t, h, w in grids.tolist() for _ in range(t)], device="cpu")
    output = tower(pixels, grid_thw=frames.to(pixels.device))
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=1)


def _family(module: str, tower: str, prepare: Prepare) -> Family:
    return Family(hugging_face(module, tower), prepare, block_eager, VISUAL)


_QWEN3 = BlockPatches.reader(16, HALF, first_to_last)
_QWEN2 = BlockPatches.reader(14, CLIP, whole_steps_of_equal_parts, video=FRAME_FORMAT)
_QWEN3_VL = _family("qwen3_vl", "Qwen3VLVisionModel", _QWEN3)
_QWEN3_5 = _family("qwen3_5", "Qwen3_5VisionModel", _QWEN3)
_QWEN2_5_VL = _family("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", _QWEN2)
_QWEN2_VL = _family("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", _QWEN2)
_GLM4V, _GLM46V = (
    _family("glm4v", "Glm4vVisionModel", BlockPatches.reader(14, CLIP, rule, images_are_clips=True))
    for rule in (by_seconds, by_length)
)

FAMILIES = {
    # Mixture-of-experts models share the dense ones' tower.
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_vl_vision", "qwen3_vl_moe_vision"), _QWEN3_VL),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_vision", "qwen3_5_moe_vision"), _QWEN3_5),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), _QWEN2_5_VL),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_vision"), _QWEN2_VL),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm4v_vision", "glm4v_moe_vision"), _GLM4V),
    "glm46v": _GLM46V,
}
