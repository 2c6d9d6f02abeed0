"""Pixels to patches, in the orders and with the arithmetic of the models' processors, without torchvision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxsplit_encoder.errors import InputError

_MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class PatchFormat:
    """How a processor resizes, normalizes and cuts what it gets."""

    min_pixels: int
    """Smaller inputs are enlarged to this. Of a video it counts the pixels of all frames together."""

    max_pixels: int
    """Larger inputs are shrunk to this."""

    patch_size: int = 16
    """Side of a patch in pixels."""

    merge_size: int = 2
    """Patches that become one output token along each side."""

    temporal_patch_size: int = 2
    """Frames that become one."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from every channel, whose values are 0 to 1."""

    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Divides every channel afterwards."""

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
            "mean": _channels(settings.get("image_mean")),
            "std": _channels(settings.get("image_std")),
        }
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


# Published Qwen3-VL checkpoints enlarge images to 65536 pixels; without a checkpoint small ones stay small.
IMAGE_FORMAT = PatchFormat(min_pixels=56 * 56, max_pixels=16_777_216)
VIDEO_FORMAT = PatchFormat(min_pixels=4096, max_pixels=25_165_824)


def _channels(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)


def video_frame_size(num_frames: int, height: int, width: int, form: PatchFormat) -> tuple[int, int]:
    """Height and width to which every frame of a video is resized.

    Raises:
        InputError: one side is over 200 times the other.
    """
    factor, temporal = form.factor, form.temporal_patch_size
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
        raise InputError(
            f"frames of {width} x {height} pixels; expected an aspect ratio of at most {_MAX_ASPECT_RATIO}"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    volume = round(num_frames / temporal) * temporal * rows * columns
    if volume > form.max_pixels:
        shrink = math.sqrt(num_frames * height * width / form.max_pixels)
        rows, columns = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif volume < form.min_pixels:
        enlarge = math.sqrt(form.min_pixels / (num_frames * height * width))
        rows, columns = (math.ceil(s * enlarge / factor) * factor for s in (height, width))
    return rows, columns


def normalize_pixels(
    pixels: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.float32]:
    """Bytes (images, height, width, channels) to values around 0, (images, channels, height, width)."""
    # Through float64 and back, as the image processors do, so that the same pixels give the same values.
    scaled = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    means, deviations = (np.array(values, dtype=np.float32) for values in (mean, std))
    normalized: NDArray[np.float32] = (scaled - means) / deviations
    return normalized.transpose(0, 3, 1, 2)


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


def patchify_raster(frames: NDArray[np.float32], patch_size: int) -> NDArray[np.float32]:
    """Cut frames (frames, channels, height, width) into patches, frame by frame and row by row.

    Returns:
        (frames * height * width / patch_size^2, channels, patch_size, patch_size).
    """
    count, channels, height, width = frames.shape
    rows, columns = height // patch_size, width // patch_size
    split = frames.reshape(count, channels, rows, patch_size, columns, patch_size)
    return split.transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels, patch_size, patch_size)


def padded_size(
    height: int, width: int, patch_size: int, merge_size: int, max_patches: int, max_side: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """How MoonViT's processors fit an image (transformers' `navit_resize`): it is never enlarged.

    Args:
        height, width: of the image.
        patch_size: side of a patch in pixels.
        merge_size: patches that become one output token along each side.
        max_patches: the most patches; larger images are shrunk.
        max_side: the most patches a side.

    Returns:
        (height, width) to which it is resized, and to which it is padded.
    """
    patches = max(1, height // patch_size) * max(1, width // patch_size)
    longest = max_side * patch_size
    scale = min(1.0, math.sqrt(max_patches / patches), longest / height, longest / width)
    sides = [min(max(1, int(side * scale)), longest) for side in (height, width)]
    factor = merge_size * patch_size
    rows, columns = (-(-side // factor) * factor for side in sides)
    return (sides[0], sides[1]), (rows, columns)
