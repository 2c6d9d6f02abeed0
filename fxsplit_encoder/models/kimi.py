"""Kimi-VL and Kimi-K2.5, on MoonViT: patches in raster order of images at their own size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from fxsplit_encoder.media import Frames
from fxsplit_encoder.media.images import bicubic
from fxsplit_encoder.models.checkpoint import Renames
from fxsplit_encoder.models.eager import GRIDS, PIXELS, Inputs
from fxsplit_encoder.models.encoders.moonvit import KimiVLVisionConfig, KimiVLVisionModel
from fxsplit_encoder.models.family import WHOLE_MODEL, Family, Settings, hugging_face, vision_settings
from fxsplit_encoder.models.patches import of_grid, patchify
from fxsplit_encoder.models.prepare import HALF, Normalization, Preparation, Prepared, ProcessorSettings
from fxsplit_encoder.models.sampling import Sampling, first_of_equal_parts
from fxsplit_encoder.towers.grid import Grid

_BICUBIC = Image.Resampling.BICUBIC

K25_NAMES: Renames = (
    (r"^encoder\.", ""),
    (r"^blocks\.(\d+)\.norm1\.", r"layers.\1.norm2."),
    (r"^blocks\.(\d+)\.norm0\.", r"layers.\1.norm1."),
    (r"^blocks\.(\d+)\.mlp\.fc1\.", r"layers.\1.mlp.fc2."),
    (r"^blocks\.(\d+)\.mlp\.fc0\.", r"layers.\1.mlp.fc1."),
    (r"^blocks\.(\d+)\.wo\.", r"layers.\1.attn.proj."),
    (r"^blocks\.(\d+)\.wqkv\.", r"layers.\1.attn.qkv."),
    (r"^blocks\.", "layers."),
    (r"^patch_embed\.pos_emb\.weight$", "patch_embed.pos_emb.position_embeddings"),
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
    sampling: Sampling = field(default_factory=lambda: Sampling(first_of_equal_parts))
    clip_options: ClassVar[Mapping[str, int]] = {"in_patch_limit_each_frame": 1 << 20}

    @property
    def takes_clips(self) -> bool:  # type: ignore[override]
        """Whether clips are taken."""
        return self.frames_per_clip > 0

    @property
    def image_options(self) -> Mapping[str, int]:  # type: ignore[override]
        """Options of Kimi-K2.5's processor or of Kimi-VL's."""
        return {"in_patch_limit" if self.takes_clips else "in_token_limit": 1 << 20}

    @classmethod
    def of_kimi_vl(cls, settings: Settings, processor: ProcessorSettings) -> RasterPatches:
        """Kimi-VL's."""
        image = processor.image
        limit = image.get("in_token_limit", 4096)
        return cls(**_sides(settings), max_patches=limit, normalization=HALF.updated(image))

    @classmethod
    def of_kimi_k25(cls, settings: Settings, processor: ProcessorSettings) -> RasterPatches:
        """Kimi-K2.5's, by the settings of its own processor or of transformers'."""
        image = {**processor.image.get("media_proc_cfg", {}), **processor.image}
        return cls(
            **_sides(settings),
            max_patches=image.get("in_patch_limit", image.get("max_patches", 16384)),
            max_side=image.get("patch_limit_on_one_side", 512),
            max_frame_patches=image.get("in_patch_limit_each_frame", 4096),
            frames_per_clip=image.get("temporal_merge_kernel_size", 4),
            normalization=HALF.updated(image),
            sampling=Sampling(first_of_equal_parts).updated(processor.video),
        )

    def image(self, image: Image.Image) -> Prepared:
        """An image of one frame."""
        fitted, grid = self.fit(1, image.width, image.height, self.max_patches)
        patches = self._patches([image.resize(fitted, _BICUBIC)], grid)
        return self.image_sizes(*image.size).with_pixels(pixel_values=patches)

    def image_sizes(self, width: int, height: int) -> Prepared:
        """An image of one frame."""
        grid = self.fit(1, width, height, self.max_patches)[1]
        if self.takes_clips:
            return of_grid("image_grid_thw", grid)
        # Kimi-VL, whose sizes have no frames.
        return Prepared({"image_grid_hws": torch.tensor([grid[1:]], device="cpu")}, {"grid": grid})

    def clip(self, frames: Frames) -> list[Prepared]:
        """Items of a few frames each."""
        fitted, _ = self.fit(1, *frames.size, self.max_frame_patches)
        images = (bicubic(frame, fitted) for frame in frames)
        items = []
        for sizes in self.clip_sizes(len(frames), *frames.size):
            own = itertools.islice(images, sizes.frames)
            items.append(sizes.with_pixels(pixel_values_videos=self._patches(own, sizes.layout["grid"])))
        return items

    def clip_sizes(self, num_frames: int, width: int, height: int) -> list[Prepared]:
        """Items of a few frames each."""
        most = self.frames_per_clip
        counts = [min(most, num_frames - start) for start in range(0, num_frames, most)]
        grids = [self.fit(count, width, height, self.max_frame_patches)[1] for count in counts]
        return [of_grid("video_grid_thw", grid, grid[0]) for grid in grids]

    def fit(self, frames: int, width: int, height: int, max_patches: int) -> tuple[tuple[int, int], Grid]:
        """The width and height to which MoonViT's processors shrink frames of at most so many patches, and
        the grid of the canvas below them (`navit_resize`).
        """
        patches = max(1, height // self.patch_size) * max(1, width // self.patch_size)
        longest = self.max_side * self.patch_size
        scale = min(1.0, math.sqrt(max_patches / patches), longest / height, longest / width)
        rows, columns = (min(max(1, int(side * scale)), longest) for side in (height, width))
        factor = self.merge_size * self.patch_size
        down, across = (-(-side // factor) * self.merge_size for side in (rows, columns))
        return (columns, rows), (frames, down, across)

    def _patches(self, frames: Iterable[Image.Image], grid: Grid) -> Tensor:
        side = self.patch_size
        black = Image.new("RGB", (grid[2] * side, grid[1] * side))

        def on_canvas(frame: Image.Image) -> Image.Image:
            canvas = black.copy()
            canvas.paste(frame)
            return canvas

        patches = patchify(map(on_canvas, frames), grid, side, self.normalization)
        return patches.view(-1, 3, side, side)


def _sides(settings: Settings) -> dict[str, Any]:
    vision = vision_settings(settings)
    merge_size = vision.get("merge_kernel_size", (2, 2))[0]
    return {"patch_size": vision.get("patch_size", 14), "merge_size": merge_size}


def _eager_k25(tower: Any, mm_kwargs: Inputs) -> Tensor:
    """Clips of different lengths one after the other, since the tower takes one length a call."""
    rows = []
    for pixels_name, grids_name in zip(PIXELS, GRIDS, strict=True):
        if pixels_name not in mm_kwargs:
            continue
        grids = mm_kwargs[grids_name]
        parts = mm_kwargs[pixels_name].split(grids.prod(1).tolist())
        start = 0
        for length in torch.unique_consecutive(grids[:, 0], return_counts=True)[1].tolist():
            end = start + length
            pixels = torch.cat(parts[start:end])
            pixels = pixels.view(-1, *tower.patch_embed.proj.weight.shape[1:])
            rows.append(tower(pixels, grids[start:end].to(pixels.device)).pooler_output.flatten(1))
            start = end
    return torch.cat(rows)


_KIMI_VL = Family(
    lambda settings: KimiVLVisionModel(KimiVLVisionConfig.from_checkpoint(settings)),
    RasterPatches.of_kimi_vl,
    prefixes=WHOLE_MODEL,
)
_KIMI_K25 = Family(
    hugging_face("kimi_k25", "Kimi_K25VisionModel"),
    RasterPatches.of_kimi_k25,
    _eager_k25,
    ("model.vision_tower.", "vision_tower.", ""),
    renames=K25_NAMES,
)

FAMILIES = {"kimi_vl": _KIMI_VL, "kimi_k25": _KIMI_K25, "kimi_k25_vision": _KIMI_K25}
