"""Images and clips as patches in blocks of those that merge, frames in pairs: the Qwen line and GLM.

Clips are cut with the arithmetic of the models' processors, without torchvision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import Frames
from fxsplit_encoder.media.images import bicubic
from fxsplit_encoder.models.eager import GRIDS, PIXELS, Inputs, joined
from fxsplit_encoder.models.family import Settings, hugging_face_class, vision_settings
from fxsplit_encoder.models.prepare import (
    HALF,
    Normalization,
    Preparation,
    Prepared,
    ProcessorSettings,
    processed,
    resized,
)
from fxsplit_encoder.models.sampling import Rule, Sampling, first_of_equal_parts

Grid = tuple[int, int, int]
"""(frames, height, width) in patches."""

IMAGE_KEYS = ("pixel_values", "image_grid_thw")
VIDEO_KEYS = ("pixel_values_videos", "video_grid_thw")
QWEN2_VL = ("qwen2_vl", "Qwen2VLImageProcessorPil")
GLM4V = ("glm4v", "Glm4vImageProcessorPil")

MOST_PIXELS = 1 << 31
_MAX_ASPECT_RATIO = 200


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
            "min_pixels": settings.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": settings.get("max_pixels") or size.get("longest_edge"),
            "patch_size": settings.get("patch_size"),
            "merge_size": settings.get("merge_size"),
            "temporal_patch_size": settings.get("temporal_patch_size"),
            "cap_pixels_per_frame": settings.get("cap_pixels_per_frame"),
            "max_video_tokens": settings.get("max_video_tokens"),
            "normalization": self.normalization.updated(settings),
        }
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


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

    Images go through the checkpoint's own image processor, or else the model's one without torchvision.
    """

    image_format: PatchFormat
    video_format: PatchFormat
    processor: tuple[str, str] = QWEN2_VL
    """Of images: its module under `transformers.models`, and its class."""
    sampling: Sampling = field(default_factory=lambda: Sampling(first_of_equal_parts))
    own: Any = None
    """The checkpoint's own image processor, which goes before; None: there is none."""
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
        image_processor: tuple[str, str] = QWEN2_VL,
        video: PatchFormat = VIDEO_FORMAT,
    ) -> Callable[[Settings, ProcessorSettings], BlockPatches]:
        """From the model's and its processors' settings; the arguments are what they may leave out."""

        def read(settings: Settings, processor: ProcessorSettings) -> BlockPatches:
            own = vision_settings(settings).get("patch_size", patch_size)
            image_format, video_format = (
                replace(form, patch_size=own, normalization=normalization).updated(given)
                for form, given in ((IMAGE_FORMAT, processor.image), (video, processor.video))
            )
            sampling = Sampling(rule).updated(processor.video)
            return cls(image_format, video_format, image_processor, sampling, processor.own)

        return read

    def image(self, image: Image.Image) -> Prepared:
        """By the model's image processor."""
        grid = self._image_grid(*image.size)  # before the processor, whose message says less
        form = self.image_format
        if form.normalization.is_later and self.processor == QWEN2_VL and self.own is None:
            size = form.patch_size * grid[2], form.patch_size * grid[1]
            pixels, _ = patchify_images([bicubic(image, size)], 1, size, form)
            return of_patches(IMAGE_KEYS, pixels, grid, grid)
        processor = self.own or image_processor(form, self.processor)
        outputs = processed(processor, image)
        t, h, w = outputs["image_grid_thw"][0].tolist()
        return of_patches(IMAGE_KEYS, outputs["pixel_values"], (t, h, w), (t, h, w))

    def image_sizes(self, width: int, height: int) -> Prepared:
        """A grid of one frame."""
        grid = self._image_grid(width, height)
        return of_patches(IMAGE_KEYS, None, grid, grid)

    def _image_grid(self, width: int, height: int) -> Grid:
        form = self.image_format
        if self.processor == GLM4V:  # to which an image is a video of two equal frames
            rows, columns = video_frame_size(form.temporal_patch_size, height, width, form)
        else:
            rows, columns = image_size(height, width, form)
        return 1, rows // form.patch_size, columns // form.patch_size

    def clip(self, frames: Frames) -> list[Prepared]:
        """One item of all frames."""
        form = self.video_format
        height, width = video_frame_size(len(frames), frames.height, frames.width, form)
        if form.normalization.is_later:
            images = (bicubic(frame, (width, height)) for frame in frames)
            pixels, grid = patchify_images(images, len(frames), (width, height), form)
            return [of_patches(VIDEO_KEYS, pixels, grid, grid, len(frames))]
        values = form.normalization(resized(frames, (width, height)))
        patches, grid = patchify_video(values.numpy(), form)
        return [of_patches(VIDEO_KEYS, patches, grid, grid, len(frames))]

    def clip_sizes(self, num_frames: int, width: int, height: int) -> list[Prepared]:
        """One item of all frames."""
        form = self.video_format
        rows, columns = video_frame_size(num_frames, height, width, form)
        steps = -(-num_frames // form.temporal_patch_size)
        grid = (steps, rows // form.patch_size, columns // form.patch_size)
        return [of_patches(VIDEO_KEYS, None, grid, grid, num_frames)]


@functools.lru_cache(maxsize=64)
def image_processor(form: PatchFormat, processor: tuple[str, str] = QWEN2_VL) -> Any:
    """A family's image processor, the one that needs no torchvision."""
    module, name = processor
    return hugging_face_class(module, "image_processing_pil", name)(
        size={"shortest_edge": form.min_pixels, "longest_edge": form.max_pixels},
        patch_size=form.patch_size,
        merge_size=form.merge_size,
        temporal_patch_size=form.temporal_patch_size,
        **form.normalization.as_settings(),
    )


def of_patches(
    keys: tuple[str, str], pixels: Any, grid: Grid, sizes: tuple[int, ...], frames: int = 0
) -> Prepared:
    """An item of patches."""
    tensors = {keys[1]: torch.tensor([sizes], device="cpu")}
    if pixels is not None:
        tensors[keys[0]] = torch.as_tensor(pixels, device="cpu")
    return Prepared(tensors, {"grid": grid}, str(math.prod(grid)), frames)


def image_size(height: int, width: int, form: PatchFormat) -> tuple[int, int]:
    """Height and width to which an image is resized.

    Raises:
        MediaError: one side is over 200 times the other.
    """
    _check_aspect_ratio(height, width, "an image")
    factor = form.factor
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > form.max_pixels:
        shrink = math.sqrt(height * width / form.max_pixels)
        rows, columns = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif rows * columns < form.min_pixels:
        enlarge = math.sqrt(form.min_pixels / (height * width))
        rows, columns = (math.ceil(s * enlarge / factor) * factor for s in (height, width))
    return rows, columns


def _check_aspect_ratio(height: int, width: int, what: str) -> None:
    if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
        raise MediaError(
            f"{what} of {width} x {height} pixels; expected an aspect ratio of at most {_MAX_ASPECT_RATIO}"
        )


def video_frame_size(num_frames: int, height: int, width: int, form: PatchFormat) -> tuple[int, int]:
    """Height and width to which every frame of a video is resized.

    Raises:
        MediaError: one side is over 200 times the other.
    """
    if form.limits_each_frame:
        return image_size(height, width, replace(form, max_pixels=_most_of_a_frame(num_frames, form)))
    factor, temporal = form.factor, form.temporal_patch_size
    max_pixels = form.max_pixels
    if form.cap_pixels_per_frame:
        max_pixels = _most_of_a_frame(num_frames, form) * num_frames
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect_ratio(height, width, "frames")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    volume = max(1, round(num_frames / temporal)) * temporal * rows * columns
    if volume > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        rows, columns = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif volume < form.min_pixels:
        enlarge = math.sqrt(form.min_pixels / (num_frames * height * width))
        rows, columns = (math.ceil(s * enlarge / factor) * factor for s in (height, width))
    return rows, columns


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


def patchify_video(
    frames: NDArray[np.float32], form: PatchFormat
) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
    """Cut frames (frames, channels, height, width) into patches; an odd last frame is repeated.

    Returns:
        The patches, (t * h * w, channels * temporal * patch * patch), and the grid (t, h, w). Within a frame
        they go by blocks of merge x merge.
    """
    patch, merge, temporal = form.patch_size, form.merge_size, form.temporal_patch_size
    if missing := -len(frames) % temporal:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    count, channels, height, width = frames.shape
    grid = (count // temporal, height // patch, width // patch)
    blocks = (grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
    split = frames.reshape(grid[0], temporal, channels, *blocks)
    # (t, temporal, C, h, mh, ph, w, mw, pw) -> (t, h, w, mh, mw, C, temporal, ph, pw)
    ordered = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(math.prod(grid), -1), grid


def patchify_images(
    images: Iterable[Image.Image], count: int, size: tuple[int, int], form: PatchFormat
) -> tuple[NDArray[np.uint8], Grid]:
    """`patchify_video` of so many images of (width, height), with their pixels as they are."""
    patch, merge, temporal = form.patch_size, form.merge_size, form.temporal_patch_size
    steps, (width, height) = -(-count // temporal), size
    rows, columns = height // form.factor, width // form.factor
    made = np.empty((steps, rows, columns, merge, merge, 3, temporal, patch, patch), np.uint8)
    for number, image in enumerate(images):
        split = np.asarray(image).reshape(rows, merge, patch, columns, merge, patch, 3)
        # (h, mh, ph, w, mw, pw, C) -> (h, w, mh, mw, C, ph, pw)
        made[number // temporal, ..., number % temporal, :, :] = split.transpose(0, 3, 1, 4, 6, 2, 5)
    for missing in range(count - temporal * steps, 0):
        made[-1, ..., missing, :, :] = made[-1, ..., (count - 1) % temporal, :, :]
    grid = (steps, height // patch, width // patch)
    return made.reshape(math.prod(grid), -1), grid


def block_eager(tower: Any, mm_kwargs: Inputs) -> Tensor:
    """The Qwen line and GLM: the main output, then the deepstack levels, along the hidden dimension."""
    pixels, grids = joined(mm_kwargs, PIXELS), joined(mm_kwargs, GRIDS)
    # To these towers a video is images, one per frame; GLM's takes nothing else.
    frames = torch.tensor([(1, h, w) for t, h, w in grids.tolist() for _ in range(t)], device="cpu")
    output = tower(pixels, grid_thw=frames.to(pixels.device))
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=1)
