"""Items for towers of every kind, with random pixels, and what follows from their sizes by plain formulas.

An item has the same pixels in whatever batch it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class Item(NamedTuple):
    """One image or video."""

    modality: str
    size: tuple[int, ...]
    """What the family measures it in."""
    seed: int


def items(modality: str, sizes: Sequence[tuple[int, ...]], first_seed: int = 0) -> list[Item]:
    """One item of each size, with different pixels."""
    return [Item(modality, size, first_seed + number) for number, size in enumerate(sizes)]


class Inputs(ABC):
    """The batches of one kind of tower, and budgets for them."""

    budgets: dict[str, tuple[int, ...]]
    """The ladder of every path, in output tokens."""
    images: tuple[tuple[int, ...], ...]
    """Sizes of images that each fit every ladder, and all together its largest budget."""
    videos: tuple[tuple[int, ...], ...]
    """The same of videos; none if the tower takes none."""
    exact: tuple[int, ...]
    """The size of an image that fills a budget of every path."""
    over: tuple[int, ...]
    """The size of an image that is over every budget of a path."""

    @abstractmethod
    def make(self, batch: Sequence[Item]) -> dict[str, Any]:
        """`mm_kwargs` of these items; the images come before the videos."""

    @abstractmethod
    def calls(self) -> list[tuple[Tensor, ...]]:
        """Arguments of the tower's own forward, of several sizes; one is over every budget."""

    @abstractmethod
    def path_tokens(self, item: Item) -> dict[str, int]:
        """The rows that an item takes on every path."""

    @abstractmethod
    def tokens(self, item: Item) -> int:
        """Rows of an item's embedding."""


def pixels_of(item: Item, *shape: int) -> Tensor:
    """Random pixels, by the item's seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(item.seed))


# --- packed towers


@dataclass(frozen=True)
class PackedInputs(Inputs):
    """Sizes are grids (t, h, w) in patches; 2 x 2 patches of a frame make a token."""

    patch_shape: tuple[int, ...]
    """Of one row of pixels."""
    image_keys: tuple[str, str] = ("pixel_values", "image_grid_thw")
    video_keys: tuple[str, str] = ("pixel_values_videos", "video_grid_thw")
    sizes_with_frames: bool = True
    """Whether `mm_kwargs` has (t, h, w), or only (h, w)."""
    pooled: bool = False
    """Whether the frames of a video become one."""
    videos: tuple[tuple[int, ...], ...] = ((2, 4, 4), (3, 2, 4))

    budgets: ClassVar[dict[str, tuple[int, ...]]] = {"default": (4, 16, 32)}
    images: ClassVar[tuple[tuple[int, ...], ...]] = ((1, 4, 6), (1, 2, 2), (1, 2, 8))
    exact: ClassVar[tuple[int, ...]] = (1, 8, 8)
    over: ClassVar[tuple[int, ...]] = (1, 12, 12)

    def make(self, batch: Sequence[Item]) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        for modality, (pixels, grid) in (("image", self.image_keys), ("video", self.video_keys)):
            own = [item for item in batch if item.modality == modality]
            if own or modality == "image":
                first = 0 if self.sizes_with_frames else 1
                sizes = [item.size[first:] for item in own]
                patches = [pixels_of(item, _product(item.size), *self.patch_shape) for item in own]
                inputs[pixels] = torch.cat([torch.zeros(0, *self.patch_shape), *patches])
                inputs[grid] = torch.tensor(sizes, dtype=torch.int64).view(len(own), 3 - first)
        return inputs

    def calls(self) -> list[tuple[Tensor, ...]]:
        batches = [[self.images[0]], self.images[::-1], [self.exact], [self.images[2]], [self.over]]
        calls = [self.make(items("image", batch)) for batch in batches]
        calls += [self.make(items("video", [video])) for video in self.videos]
        return [tuple(inputs.values())[-2:] for inputs in calls]

    def path_tokens(self, item: Item) -> dict[str, int]:
        return {"default": _product(item.size) // 4}

    def tokens(self, item: Item) -> int:
        frames, height, width = item.size
        return height * width // 4 * (1 if self.pooled else frames)


def _product(size: tuple[int, ...]) -> int:
    frames, height, width = size
    return frames * height * width


# --- towers of equal tiles


@dataclass(frozen=True)
class TileInputs(Inputs):
    """Sizes are (tiles,), of a video (frames,). A tile has 4 tokens."""

    videos: tuple[tuple[int, ...], ...] = ()

    TILE: ClassVar[tuple[int, int, int]] = (3, 16, 16)
    TOKENS: ClassVar[int] = 4
    budgets: ClassVar[dict[str, tuple[int, ...]]] = {"default": (4, 8, 32)}
    images: ClassVar[tuple[tuple[int, ...], ...]] = ((2,), (1,))
    exact: ClassVar[tuple[int, ...]] = (2,)
    over: ClassVar[tuple[int, ...]] = (9,)

    def make(self, batch: Sequence[Item]) -> dict[str, Any]:
        images = [item for item in batch if item.modality == "image"]
        tiles = [pixels_of(item, *item.size, *self.TILE) for item in images]
        videos = [pixels_of(item, *item.size, *self.TILE) for item in batch if item.modality == "video"]
        inputs: dict[str, Any] = {
            "pixel_values": torch.cat([torch.zeros(0, *self.TILE), *tiles]),
            "num_patches": torch.tensor([item.size[0] for item in images], dtype=torch.int64),
        }
        return {**inputs, "pixel_values_videos": videos} if videos else inputs

    def calls(self) -> list[tuple[Tensor, ...]]:
        counts = (1, 2, *self.over, 3, 8, 1)
        return [(pixels_of(Item("image", (), count), count, *self.TILE),) for count in counts]

    def path_tokens(self, item: Item) -> dict[str, int]:
        return {"default": self.tokens(item)}

    def tokens(self, item: Item) -> int:
        return self.TOKENS * item.size[0]


# --- towers that see an image as a whole and as crops


@dataclass(frozen=True)
class ViewInputs(Inputs):
    """Sizes are (columns, rows) of crops, (0, 0) without any."""

    whole_key: str
    crop_key: str
    count_key: str
    whole_size: int
    """Pixels a side."""
    crop_size: int
    whole_tokens: int
    """Rows that a whole image takes on its path."""
    crop_tokens: int
    grid_counts: bool = False
    """Whether `mm_kwargs` has columns and rows of crops, (1, 1) without any, or their number."""
    separators: bool = False
    """Whether an embedding has a newline after each line of its crops, and one row at its end."""
    videos: tuple[tuple[int, ...], ...] = field(default=(), init=False)

    images: ClassVar[tuple[tuple[int, ...], ...]] = ((1, 2), (0, 0), (2, 1))
    exact: ClassVar[tuple[int, ...]] = (2, 1)
    over: ClassVar[tuple[int, ...]] = (3, 2)

    @property
    def budgets(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return {
            "global": tuple(n * self.whole_tokens for n in (1, 2, 4)),
            "local": tuple(n * self.crop_tokens for n in (2, 4)),
        }

    def make(self, batch: Sequence[Item]) -> dict[str, Any]:
        whole, crops = self._shape(self.whole_size), self._shape(self.crop_size)
        counts = [columns * rows for columns, rows in (item.size for item in batch)]
        pixels = [pixels_of(item, 1, *whole) for item in batch]
        cropped = [
            pixels_of(item._replace(seed=100 + item.seed), count, *crops)
            for item, count in zip(batch, counts, strict=True)
        ]
        grids = [item.size if item.size != (0, 0) else (1, 1) for item in batch]
        return {
            self.whole_key: torch.cat([torch.zeros(0, *whole), *pixels]),
            self.crop_key: torch.cat([torch.zeros(0, *crops), *cropped]),
            self.count_key: torch.tensor(grids).view(-1, 2) if self.grid_counts else torch.tensor(counts),
        }

    def calls(self) -> list[tuple[Tensor, ...]]:
        sizes = [(count, side) for side in (self.whole_size, self.crop_size) for count in (1, 4, 3, 5)]
        return [(pixels_of(Item("image", (), count), count, *self._shape(side)),) for count, side in sizes]

    @staticmethod
    def _shape(size: int) -> tuple[int, int, int]:
        return 3, size, size

    def path_tokens(self, item: Item) -> dict[str, int]:
        return {"global": self.whole_tokens, "local": item.size[0] * item.size[1] * self.crop_tokens}

    def tokens(self, item: Item) -> int:
        tokens = sum(self.path_tokens(item).values())
        if not self.separators:
            return tokens
        lines_of_crops = item.size[1] * round(self.crop_tokens**0.5)
        return tokens + lines_of_crops + 1
