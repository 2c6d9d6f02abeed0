"""Image and clip files to the inputs of a packed tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from fxsplit_encoder.cli.patches import (
    IMAGE_FORMAT,
    VIDEO_FORMAT,
    PatchFormat,
    normalize_frames,
    patchify_video,
    video_frame_size,
)
from fxsplit_encoder.errors import InputError

_EXTENSIONS = (".apng", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Item:
    """One image or clip of a batch."""

    key: str
    """Its file name; from the second file of that name on, with #2, #3, ... in the order given."""

    width: int
    height: int
    """Of the file, before it was resized."""

    frames: int
    """Frames of a clip; 0: an image."""

    grid: tuple[int, int, int]
    """Temporally merged frames, and patches along each side."""

    tokens: int
    """Output tokens, the rows of its embedding."""

    @property
    def patches(self) -> int:
        """Rows that the tower attends over."""
        return prod(self.grid)

    @property
    def pixels(self) -> str:
        """Its size as people write it."""
        size = f"{self.width}x{self.height}"
        return f"{self.frames}x{size}" if self.frames else size


@dataclass(frozen=True)
class EncoderInputs:
    """A batch: its items, images first, then clips, and their tensors."""

    items: tuple[Item, ...]
    mm_kwargs: dict[str, torch.Tensor]
    """`pixel_values` and `image_grid_thw` if there are images, `pixel_values_videos` and `video_grid_thw` if
    there are clips."""

    def to(self, device: torch.device, dtype: torch.dtype) -> EncoderInputs:
        """The same batch with its patches on `device`, as `dtype`."""
        moved = {k: v.to(device, dtype) if v.is_floating_point() else v for k, v in self.mm_kwargs.items()}
        return EncoderInputs(self.items, moved)

    def select(self, index: int) -> EncoderInputs:
        """The batch of one item alone; its tensors are views."""
        item = self.items[index]
        peers = [other for other in self.items if bool(other.frames) == bool(item.frames)]
        position = peers.index(item)
        start = [0, *accumulate(peer.patches for peer in peers)][position]
        pixels, grids = _KEYS[bool(item.frames)]
        selected = {
            pixels: self.mm_kwargs[pixels][start : start + item.patches],
            grids: self.mm_kwargs[grids][position : position + 1],
        }
        return EncoderInputs((item,), selected)


_KEYS = {False: ("pixel_values", "image_grid_thw"), True: ("pixel_values_videos", "video_grid_thw")}


def load_inputs(
    paths: Sequence[Path], image_format: PatchFormat = IMAGE_FORMAT, video_format: PatchFormat = VIDEO_FORMAT
) -> EncoderInputs:
    """Read images and clips, the animated files that Pillow decodes: WebP, GIF, APNG. Every frame counts.

    Raises:
        InputError: a file is missing, is no image, or is too elongated.
    """
    loaded: dict[bool, list[tuple[Item, torch.Tensor]]] = {False: [], True: []}
    for key, path in zip(unique_keys(paths), paths, strict=True):
        item, pixels = _load(key, path, image_format, video_format)
        loaded[item.frames > 0].append((item, pixels))
    mm_kwargs = {}
    for is_clip, members in loaded.items():
        if members:
            pixels_key, grids_key = _KEYS[is_clip]
            mm_kwargs[pixels_key] = torch.cat([pixels for _, pixels in members])
            mm_kwargs[grids_key] = torch.tensor([item.grid for item, _ in members])
    return EncoderInputs(tuple(item for members in loaded.values() for item, _ in members), mm_kwargs)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The image and clip files among `paths`, directories searched one level deep, in order of name.

    Raises:
        InputError: a path does not exist, or a directory holds none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in path.iterdir() if file.suffix.lower() in _EXTENSIONS)
        if not inside:
            raise InputError(f"{path}: no image in this directory; expected {', '.join(_EXTENSIONS)}")
        found += inside
    return found


def unique_keys(paths: Sequence[Path]) -> list[str]:
    """The file names; from the second file of a name on, with #2, #3, ... in the order given."""
    keys: dict[str, None] = {}
    for path in paths:
        number = 1
        key = path.name
        while key in keys:
            number += 1
            key = f"{path.name}#{number}"
        keys[key] = None
    return list(keys)


def _load(
    key: str, path: Path, image_format: PatchFormat, video_format: PatchFormat
) -> tuple[Item, torch.Tensor]:
    try:
        with Image.open(path) as image:
            if getattr(image, "is_animated", False):
                return _load_clip(key, image, video_format)
            return _load_image(key, image, image_format)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: cannot be read as an image: {error}") from None


def _load_image(key: str, image: Image.Image, form: PatchFormat) -> tuple[Item, torch.Tensor]:
    upright = ImageOps.exif_transpose(image).convert("RGB")
    outputs: Mapping[str, Any] = image_processor(form)(images=[upright], return_tensors="pt")
    t, h, w = outputs["image_grid_thw"][0].tolist()
    item = Item(key, *upright.size, 0, (t, h, w), t * h * w // form.merge_size**2)
    return item, outputs["pixel_values"]


def _load_clip(key: str, clip: Image.Image, form: PatchFormat) -> tuple[Item, torch.Tensor]:
    width, height = clip.size
    count = getattr(clip, "n_frames", 1)
    size = video_frame_size(count, height, width, form)
    frames = np.stack(list(_frames(clip, size)))
    patches, grid = patchify_video(normalize_frames(frames, form), form)
    item = Item(key, width, height, count, grid, prod(grid) // form.merge_size**2)
    return item, torch.from_numpy(patches)


def _frames(clip: Image.Image, size: tuple[int, int]) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    height, width = size
    for frame in ImageSequence.Iterator(clip):
        yield np.asarray(frame.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))


def image_processor(form: PatchFormat) -> Qwen2VLImageProcessorPil:
    """The image processor of the Qwen line that needs no torchvision."""
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": form.min_pixels, "longest_edge": form.max_pixels},
        patch_size=form.patch_size,
        merge_size=form.merge_size,
        temporal_patch_size=form.temporal_patch_size,
        image_mean=list(form.mean),
        image_std=list(form.std),
    )
