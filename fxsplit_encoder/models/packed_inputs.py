"""Images and clips as patches: the Qwen line, GLM, and MoonViT's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from PIL import Image

from fxsplit_encoder.models.builders import Settings, vision_settings
from fxsplit_encoder.models.patches import (
    IMAGE_FORMAT,
    VIDEO_FORMAT,
    PatchFormat,
    normalize_pixels,
    padded_size,
    patchify_raster,
    patchify_video,
    video_frame_size,
)
from fxsplit_encoder.models.preparation import (
    HALF,
    Normalization,
    Preparation,
    Prepared,
    ProcessorSettings,
    frames_of,
)

Grid = tuple[int, int, int]
"""(frames, height, width) in patches."""

_IMAGE_KEYS = ("pixel_values", "image_grid_thw")
_VIDEO_KEYS = ("pixel_values_videos", "video_grid_thw")


def _prepared(
    keys: tuple[str, str], pixels: Any, grid: Grid, sizes: tuple[int, ...], frames: int = 0
) -> Prepared:
    tensors = {keys[0]: torch.as_tensor(pixels), keys[1]: torch.tensor([sizes])}
    return Prepared(tensors, {"grid": grid}, str(prod(grid)), frames)


@dataclass(frozen=True)
class BlockPatches(Preparation):
    """Patches in blocks of those that merge, frames in pairs: the Qwen line and GLM.

    Images go through the model's own image processor, the one without torchvision.
    """

    image_format: PatchFormat
    video_format: PatchFormat
    is_glm: bool = False
    takes_clips = True

    @classmethod
    def reader(
        cls, patch_size: int, normalization: Normalization, is_glm: bool = False
    ) -> Callable[[Settings, ProcessorSettings], BlockPatches]:
        """From the model's and its processors' settings; the arguments are what they may leave out."""

        def read(settings: Settings, processor: ProcessorSettings) -> BlockPatches:
            own = vision_settings(settings).get("patch_size", patch_size)
            changes = {"patch_size": own, "mean": normalization.mean, "std": normalization.std}
            image, video = (replace(form, **changes) for form in (IMAGE_FORMAT, VIDEO_FORMAT))
            return cls(image.updated(processor.image), video.updated(processor.video), is_glm)

        return read

    def image(self, image: Image.Image) -> Prepared:
        """By the model's image processor."""
        outputs = image_processor(self.image_format, self.is_glm)(images=[image], return_tensors="pt")
        t, h, w = outputs["image_grid_thw"][0].tolist()
        return _prepared(_IMAGE_KEYS, outputs["pixel_values"], (t, h, w), (t, h, w))

    def clip(self, clip: Image.Image) -> list[Prepared]:
        """One item of all frames."""
        form = self.video_format
        height, width = video_frame_size(getattr(clip, "n_frames", 1), clip.height, clip.width, form)
        frames = np.stack([np.asarray(frame) for frame in frames_of(clip, (width, height))])
        patches, grid = patchify_video(normalize_pixels(frames, form.mean, form.std), form)
        return [_prepared(_VIDEO_KEYS, patches, grid, grid, len(frames))]


def image_processor(form: PatchFormat, is_glm: bool = False) -> Any:
    """The image processor of the Qwen line or of GLM that needs no torchvision."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make: Any = Glm4vImageProcessorPil if is_glm else Qwen2VLImageProcessorPil
    return make(
        size={"shortest_edge": form.min_pixels, "longest_edge": form.max_pixels},
        patch_size=form.patch_size,
        merge_size=form.merge_size,
        temporal_patch_size=form.temporal_patch_size,
        image_mean=list(form.mean),
        image_std=list(form.std),
    )


@dataclass(frozen=True)
class RasterPatches(Preparation):
    """Patches in raster order of images at their own size, on black where a side is no multiple: MoonViT."""

    patch_size: int = 14
    merge_size: int = 2
    max_patches: int = 4096
    max_side: int = 512
    max_frame_patches: int = 4096
    """Of each frame of a clip."""
    frames_per_clip: int = 0
    """Frames that one item holds; clips are cut. 0: the model takes images only."""
    normalization: Normalization = HALF

    @property
    def takes_clips(self) -> bool:  # type: ignore[override]
        """Whether clips are taken."""
        return self.frames_per_clip > 0

    @classmethod
    def of_kimi_vl(cls, settings: Settings, processor: ProcessorSettings) -> RasterPatches:
        """Kimi-VL's."""
        given = processor.image
        return cls(
            patch_size=vision_settings(settings).get("patch_size", 14),
            merge_size=_side(vision_settings(settings)),
            max_patches=given.get("in_token_limit", 4096),
            normalization=HALF.updated(given),
        )

    @classmethod
    def of_kimi_k25(cls, settings: Settings, processor: ProcessorSettings) -> RasterPatches:
        """Kimi-K2.5's, by the settings of its own processor or of transformers'."""
        image = {**processor.image, **processor.image.get("media_proc_cfg", {})}
        return cls(
            patch_size=vision_settings(settings).get("patch_size", 14),
            merge_size=_side(vision_settings(settings)),
            max_patches=image.get("in_patch_limit", image.get("max_patches", 16384)),
            max_side=image.get("patch_limit_on_one_side", 512),
            max_frame_patches=image.get("in_patch_limit_each_frame", 4096),
            frames_per_clip=image.get("temporal_merge_kernel_size", 4),
            normalization=HALF.updated(image),
        )

    def image(self, image: Image.Image) -> Prepared:
        """An image of one frame."""
        patches, grid = self._patches([image], self.max_patches)
        if not self.takes_clips:  # Kimi-VL, whose sizes have no frames
            return _prepared(("pixel_values", "image_grid_hws"), patches, grid, grid[1:])
        return _prepared(_IMAGE_KEYS, patches, grid, grid)

    def clip(self, clip: Image.Image) -> list[Prepared]:
        """Items of a few frames each."""
        if not self.takes_clips:
            return super().clip(clip)
        frames = list(frames_of(clip, clip.size))
        parts = (frames[i : i + self.frames_per_clip] for i in range(0, len(frames), self.frames_per_clip))
        cut = [self._patches(part, self.max_frame_patches) for part in parts]
        return [_prepared(_VIDEO_KEYS, patches, grid, grid, grid[0]) for patches, grid in cut]

    def _patches(self, frames: list[Image.Image], max_patches: int) -> tuple[Any, Grid]:
        width, height = frames[0].size
        size, padded = padded_size(
            height, width, self.patch_size, self.merge_size, max_patches, self.max_side
        )
        canvases = []
        for frame in frames:
            canvas = Image.new("RGB", padded[::-1])
            canvas.paste(frame.resize(size[::-1], Image.Resampling.BICUBIC))
            canvases.append(canvas)
        pixels = self.normalization(canvases).numpy()
        grid = (len(frames), padded[0] // self.patch_size, padded[1] // self.patch_size)
        return patchify_raster(pixels, self.patch_size), grid


def _side(vision: dict[str, Any]) -> int:
    side: int = vision.get("merge_kernel_size", (2, 2))[0]
    return side
