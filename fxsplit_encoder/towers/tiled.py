"""Towers that see an image twice, as a whole and as crops of another size: the common part of their adapters.

The views are two paths, captured apart: "global" and "local". Tiles of a view have one size and never attend
to one another; an image's rows are put together after the replays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.towers.base import given_batch
from fxsplit_encoder.towers.grid import cumulative_lengths
from fxsplit_encoder.towers.inputs import (
    MOST_PLANNED_ITEMS,
    MOST_ROWS,
    check_given,
    integer_rows,
    number_of,
    one_or_several,
    pixel_parts,
    rows_of,
)
from fxsplit_encoder.towers.tiles import TileTower, View

CropGrid = tuple[int, int]
"""(columns, rows) of an image's crops; (0, 0) without any."""


class TiledTower(TileTower):
    """A tower with two views behind the manager's protocol, and still a module with the tower's own forward.

    Every image has one tile in "global" and any number in "local". `mm_kwargs` holds the whole images, and
    the crops of all in one tensor or one entry an image, which may be None, empty or a tile of zeros. An
    adapter gives `count_key`, `crop_grids`, `select_grids`, `encode`, and where an image is more than its
    tiles' rows `num_tokens` and `assemble`.
    """

    max_tiles: ClassVar[int] = 8
    count_key: ClassVar[str]
    """Where `mm_kwargs` hold the number of crops of every image."""

    def __init__(
        self,
        tower: nn.Module,
        *,
        whole: View,
        crop: View,
        out_hidden_size: int,
        children: Mapping[str, nn.Module] | None = None,
    ) -> None:
        views = {"global": whole, "local": replace(crop, optional=True)}
        super().__init__(tower, views, out_hidden_size, children)

    # --- what an adapter gives

    @abstractmethod
    def crop_grids(self, mm_kwargs: dict[str, Any]) -> list[CropGrid]:
        """The crops of every image."""

    @abstractmethod
    def select_grids(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The inputs that describe how the images `indices` are cropped."""

    def num_tokens(self, crops: CropGrid) -> int:
        """Rows of an image's embedding."""
        return self.views["global"].tokens + crops[0] * crops[1] * self.views["local"].tokens

    def assemble(self, whole: Tensor, tiles: Tensor, crops: CropGrid) -> Tensor:
        """The embedding of an image, in memory of its own, from (tokens, hidden) of the whole image and
        (columns * rows * tokens, hidden) of its crops, row by row; `crops` are their columns and rows.
        """
        return torch.cat((tiles, whole))

    # --- the module

    def forward(self, pixel_values: Tensor) -> Any:
        """The tower's forward on the tiles of one view, with the tower's own output type."""
        self.trace_plain_blocks_once()
        return self.tower(pixel_values)

    # --- the manager's protocol

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Patches and output rows of every image, and the rows of each path. Tiles may be missing, of all
        views.

        Raises:
            InputError: the inputs contradict one another, or there are videos.
        """
        self.refuse_videos(mm_kwargs)
        names = [view.input_name for view in self.views.values()]
        check_given(mm_kwargs, [*names, self.count_key], type(self).__name__)
        grids = self._read_grids(mm_kwargs)
        if any(mm_kwargs.get(name) is not None for name in names):
            for path in self.views:
                self._tiles_of(mm_kwargs, path, grids)
        whole, crop = self.views["global"], self.views["local"]
        specs = []
        for grid in grids:
            tiles = grid[0] * grid[1]
            paths = {"global": whole.tokens, "local": tiles * crop.tokens}
            size = whole.input_size + tiles * crop.input_size
            specs.append(EncoderItemSpec(size, self.num_tokens(grid), paths))
        return specs

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some images, in the order of `indices`."""
        grids = self._read_grids(mm_kwargs)
        selected = self.select_grids(mm_kwargs, indices)
        crops = [columns * rows for columns, rows in grids]
        for path, counts in (("global", [1] * len(crops)), ("local", crops)):
            starts = cumulative_lengths(counts).tolist()
            parts = rows_of(self._tiles_of(mm_kwargs, path, grids), starts, indices)
            selected[self.views[path].input_name] = one_or_several(parts)
        return selected

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, Tensor] | list[Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Puts every image together from its rows on the two paths, always in a copy; InputError without
        `batch_mm_kwargs`, which hold the number of crops.
        """
        grids = self.crop_grids(given_batch(batch_mm_kwargs))
        whole = outputs["global"]
        crop = outputs.get("local", whole[:0])
        start = 0
        tokens = {path: view.tokens for path, view in self.views.items()}
        for number, (index, grid) in enumerate(zip(indices, grids, strict=True)):
            end = start + grid[0] * grid[1] * tokens["local"]
            rows = whole[number * tokens["global"] : (number + 1) * tokens["global"]]
            dest[index] = self.assemble(rows, crop[start:end], grid)
            start = end

    # --- inputs

    def tiles(self, mm_kwargs: dict[str, Any], path: str) -> list[Tensor]:
        """The tiles of a view, in one tensor or several; InputError for another number or shape than the
        images have.
        """
        return self._tiles_of(mm_kwargs, path, self._read_grids(mm_kwargs))

    def _read_grids(self, mm_kwargs: dict[str, Any]) -> list[CropGrid]:
        """The crops of every image; no more images than there are whole ones, or than a plan takes."""
        name, given = self.first_view.input_name, mm_kwargs.get(self.first_view.input_name)
        images = None if given is None else sum(part.shape[0] for part in pixel_parts(given, name))
        described = number_of(mm_kwargs.get(self.count_key))
        if described > (MOST_PLANNED_ITEMS if images is None else images):
            raise InputError(
                f"{name}: expected {(described, *self.first_view.shape)} for the {described} images of "
                f"{self.count_key}; got {images}"
            )
        grids = self.crop_grids(mm_kwargs)
        crops = sum(columns * rows for columns, rows in grids)
        if crops * self.views["local"].tokens > MOST_ROWS:
            raise InputError(f"{self.count_key}: describes {crops} crops, more than a batch has rows for")
        return grids

    def _tiles_of(self, mm_kwargs: dict[str, Any], path: str, grids: list[CropGrid]) -> list[Tensor]:
        view = self.views[path]
        counts = [1 if path == "global" else columns * rows for columns, rows in grids]
        expected, given = sum(counts), mm_kwargs.get(view.input_name)
        present = given
        if path == "local" and isinstance(given, list | tuple):
            present = [part for part in given if part is not None]
        tiles = pixel_parts(present, view.input_name)
        if expected == 0 and (path == "local" or not tiles):
            if tiles and mm_kwargs.get(self.count_key) is None:
                self._check_unused(tiles, view.input_name)
            like = tiles[0] if tiles else torch.empty(0, dtype=torch.float32, device="cpu")
            return [like.new_empty(0, *view.shape)]
        if path == "local":
            tiles = _real_crops(given, tiles, counts)
        shapes = [tuple(part.shape) for part in tiles]
        if any(shape[1:] != view.shape for shape in shapes) or sum(shape[0] for shape in shapes) != expected:
            raise InputError(
                f"{view.input_name}: expected {(expected, *view.shape)} for {len(grids)} images; got "
                f"{', '.join(map(str, shapes[:8])) or None}; pass what the model's processor makes at "
                f"{view.shape[-1]} pixels"
            )
        return tiles

    def _check_unused(self, crops: Sequence[Tensor], name: str) -> None:
        """Raises InputError for crops that are assigned to no image."""
        if any(part.shape[0] for part in crops):
            raise InputError(f"{self.count_key}: expected the crops of every image in {name}; got None")


def read_counts(values: Any, name: str, length: int) -> list[tuple[int, ...]]:
    """Rows of `length` non-negative integers from a tensor, an array or nested sequences, else InputError."""
    expected = f"{length} non-negative integers for each image"
    rows = integer_rows(values, name, length, expected)
    for row in rows:
        if min(row) < 0:
            raise InputError(f"{name}: expected {expected}; got {row}")
    return rows


def _real_crops(given: Any, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The crops that images have, without placeholders: None, an empty tensor, or a tile of zeros. `given` is
    a tensor, or tensors for each image, `parts` the same without None, `counts` the crops of every image.
    """
    expected, total = sum(counts), sum(part.shape[0] for part in parts)
    if total != expected and isinstance(given, list | tuple) and len(given) == len(counts):
        pairs = zip(given, counts, strict=True)
        parts = [part for part, count in pairs if part is not None and (count or part.shape[0] > 1)]
    elif total != expected:
        starts = cumulative_lengths([max(count, 1) for count in counts]).tolist()
        if total == starts[-1]:
            return rows_of(parts, starts, [image for image, count in enumerate(counts) if count])
    return [part for part in parts if part.shape[0]]


def crops_in_a_row(mm_kwargs: dict[str, Any], name: str, whole_name: str) -> list[CropGrid]:
    """The crops of every image where only their number matters; `name` is where `mm_kwargs` holds it, and
    without it no image has any.
    """
    counts = mm_kwargs.get(name)
    if counts is not None:
        return [(count, 1) if count else (0, 0) for (count,) in read_counts(counts, name, 1)]
    return [(0, 0)] * sum(part.shape[0] for part in pixel_parts(mm_kwargs.get(whole_name), whole_name))


def square_view(input_name: str, size: int, patches: int, tokens: int) -> View:
    """Square tiles of three channels, `size` pixels per side, whose `patches` attend to one another."""
    return View(input_name, (3, size, size), tokens, input_size=patches)


def downsampled(side: int) -> int:
    """Positions per side after a convolution of 3 x 3 with stride 2 and padding 1."""
    return (side + 1) // 2
