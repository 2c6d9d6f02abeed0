"""Inputs of one batch as vLLM's runners hand them to a model, by what its processor makes of an image.

Each class makes `mm_kwargs` of items of given sizes, with random pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Size = Any
"""What an item is described by; each class says what."""


def _pixels(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


@dataclass(frozen=True)
class Grids:
    """Rows of patches and (frames, rows, columns): Qwen and GLM. A size is such a grid."""

    features: int
    raw: bool = False
    """Whether pixels are bytes, which the model normalizes."""

    def __call__(self, modality: str, sizes: list[Size]) -> dict[str, Any]:
        names = {"image": ("pixel_values", "image_grid_thw")}
        pixels, grids = names.get(modality, ("pixel_values_videos", "video_grid_thw"))
        values = _pixels(sum(map(math.prod, sizes)), self.features)
        if self.raw:
            values = (values * 64 + 128).clamp(0, 255).to(torch.uint8)
        return {pixels: values, grids: torch.tensor(sizes)}


@dataclass(frozen=True)
class Rasters:
    """Square patches in raster order: Kimi. A size is (rows, columns), or (frames, rows, columns)."""

    grids: str
    patch: int = 4

    def __call__(self, modality: str, sizes: list[Size]) -> dict[str, Any]:
        rows = sum(map(math.prod, sizes))
        return {"pixel_values": _pixels(rows, 3, self.patch, self.patch), self.grids: torch.tensor(sizes)}


@dataclass(frozen=True)
class Tiles:
    """Equal tiles: InternVL and Llama 4. A size is the number of an item's tiles."""

    side: int
    names: dict[str, tuple[str, str]]
    """By modality: the keys of the tiles and of their numbers."""
    others: dict[str, Any]
    """What the model reads besides."""

    def __call__(self, modality: str, sizes: list[Size]) -> dict[str, Any]:
        tiles, counts = self.names[modality]
        others = {name: value(sizes) if callable(value) else value for name, value in self.others.items()}
        pixels = _pixels(sum(sizes), 3, self.side, self.side)
        return {tiles: pixels, counts: torch.tensor(sizes), **others}


@dataclass(frozen=True)
class Views:
    """A whole view and crops: Step3 and DeepSeek. A size is the grid of crops, (columns, rows)."""

    whole: int
    crop: int
    crops_name: str
    counts_name: str
    grids: bool
    """Whether the model gets the grids themselves, (1, 1) for no crops, or their numbers."""

    def __call__(self, modality: str, sizes: list[Size]) -> dict[str, Any]:
        counts = [math.prod(size) for size in sizes]
        grids = [size if math.prod(size) else (1, 1) for size in sizes]
        return {
            "pixel_values": _pixels(len(sizes), 3, self.whole, self.whole),
            self.crops_name: _pixels(sum(counts), 3, self.crop, self.crop),
            self.counts_name: torch.tensor(grids if self.grids else counts),
        }


@dataclass(frozen=True)
class WholeAndTiles:
    """A whole view and tiles of the same size, in one tensor: DeepSeek-VL2. A size is (columns, rows)."""

    side: int

    def __call__(self, modality: str, sizes: list[Size]) -> dict[str, Any]:
        count = sum(1 + math.prod(size) for size in sizes)
        return {
            "pixel_values": _pixels(count, 3, self.side, self.side),
            "images_spatial_crop": torch.tensor(sizes),
        }


@dataclass(frozen=True)
class Slices:
    """Strips of patches of any grid: MiniCPM-V. A size is a list of grids (rows, columns), one a slice."""

    patch: int

    def __call__(self, modality: str, sizes: list[Size]) -> dict[str, Any]:
        prefix = "video_" if modality == "video" else ""
        pixels = [
            [_pixels(3, self.patch, rows * columns * self.patch) for rows, columns in grids]
            for grids in sizes
        ]
        return {
            f"{prefix}pixel_values": pixels,
            f"{prefix}tgt_sizes": [torch.tensor(grids) for grids in sizes],
        }


@dataclass(frozen=True)
class Positioned:
    """Patches of equally large images with their positions: Gemma 4. A size is (frames, columns, rows)."""

    patch: int

    def __call__(self, modality: str, sizes: list[Size]) -> dict[str, Any]:
        columns, rows = sizes[0][1:]
        frames = sum(size[0] for size in sizes)
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        positions = torch.stack([x, y], dim=-1).view(1, -1, 2).expand(frames, -1, -1).contiguous()
        suffix = "_videos" if modality == "video" else ""
        batch = {
            f"pixel_values{suffix}": _pixels(frames, rows * columns, 3 * self.patch**2).sigmoid(),
            f"pixel_position_ids{suffix}": positions,
        }
        if modality == "video":
            batch["video_frame_counts"] = torch.tensor([size[0] for size in sizes])
        return batch
