"""The common part of adapters for towers that encode tiles of one fixed size.

`mm_kwargs` hold the tiles of all images, `pixel_values` (tiles, channels, height, width), and `num_patches`
or `image_num_patches`, the tiles of every image; without it every tile is an image. Videos are in
`pixel_values_videos`, whose frames are tiles: (videos, frames, channels, height, width), a list of (frames,
...), or one tensor with `video_num_patches`. Items are the images, then the videos.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.dispatch import check
from fxsplit_encoder.compile import HostOp, register_host_op
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown
from fxsplit_encoder.protocol import BudgetDeclaration, EncoderItemSpec
from fxsplit_encoder.towers.base import VIDEOS
from fxsplit_encoder.towers.grid import cumulative_lengths
from fxsplit_encoder.towers.inputs import (
    MOST_PLANNED_ITEMS,
    MOST_ROWS,
    check_given,
    check_pixels,
    integer_rows,
    number_of,
    one_or_several,
    pixel_parts,
    rows_of,
)
from fxsplit_encoder.towers.tiles import TileTower, View

VIDEO_COUNTS = "video_num_patches"


class DenseTower(TileTower):
    """A tower of tiles of one size. An adapter gives `features`, and `call` where that is not the tower's own
    forward. Attention stays torch's dense one, which is faster for equal segments.

    Args:
        tower: the vision tower, whose parameters determine device and dtype.
        tile_shape: channels, height and width of a tile, or what else one has.
        tokens_per_tile: rows of output that a tile gives.
        out_hidden_size: columns of the output.
        input_name: the tiles' key in `mm_kwargs`, and the name of the forward's first argument.
        children: as of `WrappedTower`.
    """

    count_keys: ClassVar[tuple[str, ...]] = ("num_patches", "image_num_patches")
    """Where `mm_kwargs` may have the tiles of every image."""
    max_tiles: ClassVar[int] = 16

    def __init__(
        self,
        tower: nn.Module,
        *,
        tile_shape: tuple[int, ...],
        tokens_per_tile: int,
        out_hidden_size: int,
        input_name: str = "pixel_values",
        children: Mapping[str, nn.Module] | None = None,
    ) -> None:
        views = {"default": View(input_name, tile_shape, tokens_per_tile)}
        super().__init__(tower, views, out_hidden_size, children)
        self.tile_shape = tile_shape
        self.tokens_per_tile = tokens_per_tile
        self.input_name = input_name

    # --- what an adapter gives

    @abstractmethod
    def features(self, tiles: Tensor) -> Tensor:
        """(tiles, tokens_per_tile, out_hidden_size) from (tiles, channels, height, width)."""

    def call(self, tiles: Tensor) -> Any:
        """The wrapped module's own forward, with its own output type."""
        return self.tower(tiles)

    # --- the module

    def forward(self, pixel_values: Tensor) -> Any:
        """The wrapped module's own forward and output. Called as a module, it takes the forward's options
        too: with those that change the output, the wrapped module itself runs.
        """
        if torch.compiler.is_compiling():
            # InternVL's reshape to -1 divides by the number of tiles.
            check(pixel_values.shape[0] > 0)  # type: ignore[no-untyped-call]
            pixel_values = tiles(pixel_values, self.tokens_per_tile, self.max_tiles, self.declares_padding)[0]
            self.trace_plain_blocks_once()
        return self.encode(pixel_values, "default") if self.returns_rows else self.call(pixel_values)

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """(tiles * tokens_per_tile, out_hidden_size) from tiles; InputError for an output of other sizes than
        declared.
        """
        features = self.features(tiles)
        expected = (self.tokens_per_tile, self.out_hidden_size)
        if features.dim() != 3 or tuple(features.shape[1:]) != expected:
            raise InputError(
                f"{type(self.tower).__name__}: expected features of (tiles, {expected[0]}, {expected[1]}); "
                f"got {tuple(features.shape)}"
            )
        return features.flatten(0, 1)

    # --- the manager's protocol

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """ "video" if there are videos, else "image"."""
        return "video" if mm_kwargs.get(VIDEOS) is not None else "image"

    def get_max_frames_per_video(self) -> int:
        """Frames of the longest video that a budget holds; they are tiles."""
        return self.max_tiles if "video" in self.modalities else 1

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Tiles and output tokens of every item; tiles may be missing. InputError if the inputs contradict
        one another.
        """
        counts = self._planned_counts(mm_kwargs)
        return [
            EncoderItemSpec(input_size=count, output_tokens=count * self.tokens_per_tile)
            for count in (self._read(mm_kwargs)[1] if counts is None else counts)
        ]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some items, in the order of `indices`."""
        pixels, counts = self._read(mm_kwargs)
        selected = one_or_several(rows_of(pixels, cumulative_lengths(counts).tolist(), indices))
        return {self.input_name: selected, self.count_keys[0]: [counts[i] for i in indices]}

    # --- inputs

    def tiles(self, mm_kwargs: dict[str, Any], path: str = "default") -> list[Tensor]:
        """The tiles of a batch: the images', then the videos'."""
        return self._read(mm_kwargs)[0]

    def image_counts(self, mm_kwargs: dict[str, Any]) -> Any:
        """The tiles of every image, as numbers in any container; None if they are not given."""
        return next((mm_kwargs[key] for key in self.count_keys if mm_kwargs.get(key) is not None), None)

    def _planned_counts(self, mm_kwargs: dict[str, Any]) -> list[int] | None:
        """How many tiles every item of a plan without tiles has; None if there are tiles, or no counts."""
        takes_videos = "video" in self.modalities
        tiles = (self.input_name, VIDEOS)
        given = {self.count_keys[0]: self.image_counts(mm_kwargs)}
        if takes_videos:
            given[VIDEO_COUNTS] = mm_kwargs.get(VIDEO_COUNTS)
        given = {name: counts for name, counts in given.items() if counts is not None}
        if not given or any(mm_kwargs.get(name) is not None for name in tiles):
            return None
        most = MOST_ROWS // self.tokens_per_tile
        return [count for name, counts in given.items() for count in _planned(name, counts, most)]

    def _read(self, mm_kwargs: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
        """The tiles of a batch, and how many every item has: the images', then the videos'."""
        takes_videos = "video" in self.modalities
        if not takes_videos:
            self.refuse_videos(mm_kwargs)
        names = (self.input_name, VIDEOS) if takes_videos else (self.input_name,)
        check_given(mm_kwargs, names, type(self).__name__)
        images, videos = mm_kwargs.get(self.input_name), mm_kwargs.get(VIDEOS)
        tensors: list[Tensor] = []
        counts: list[int] = []
        if images is not None:
            tensors = self._checked(self.input_name, images)
            total = sum(part.shape[0] for part in tensors)
            counts = _counts(self.input_name, self.image_counts(mm_kwargs), total)
        if videos is not None:
            clips, frames = self._read_videos(videos, mm_kwargs.get(VIDEO_COUNTS))
            tensors += clips
            counts += frames
        return tensors or [torch.zeros(0, *self.tile_shape, dtype=torch.float32, device="cpu")], counts

    def _read_videos(self, videos: Any, frames: Any) -> tuple[list[Tensor], list[int]]:
        if isinstance(videos, list | tuple):
            clips = self._checked(VIDEOS, videos)
            return clips, [clip.shape[0] for clip in clips]
        check_pixels(videos, VIDEOS)
        if videos.dim() == 5:
            self._check_tile(VIDEOS, videos.shape, videos.shape[2:])
            return [videos.flatten(0, 1)], [videos.shape[1]] * videos.shape[0]
        if frames is None:
            raise InputError(
                f"{VIDEOS}: a tensor of {videos.dim()} dimensions needs {VIDEO_COUNTS}, their frames; "
                "pass them, or (videos, frames, channels, height, width)"
            )
        return self._checked(VIDEOS, videos), _counts(VIDEOS, frames, videos.shape[0])

    def _checked(self, name: str, given: Any) -> list[Tensor]:
        """The tensors of an input, each of whole tiles."""
        parts = pixel_parts(given, name)
        for part in parts:
            self._check_tile(name, part.shape, part.shape[1:])
        return parts

    def _check_tile(self, name: str, shape: Sequence[int], tile: Sequence[int]) -> None:
        if tuple(tile) != self.tile_shape:
            sizes = ", ".join(map(str, self.tile_shape))
            raise InputError(f"{name}: expected (tiles, {sizes}); got {tuple(shape)}")


def _counts(name: str, given: Any, total: int) -> list[int]:
    """The tiles of every item; one each where nothing is given."""
    if given is None:
        return [1] * total
    expected = f"tile counts of at least 1 that add up to its {total} tiles"
    if number_of(given) > total:
        raise InputError(f"{name}: expected {expected}; got {number_of(given)} counts")
    counts = [count for (count,) in integer_rows(given, name, 1, expected)]
    if any(count < 1 for count in counts) or sum(counts) != total:
        raise InputError(f"{name}: expected {expected}; got {shown(counts)}")
    return counts


def _planned(name: str, given: Any, most: int) -> list[int]:
    """The tiles of every item of a plan, `most` in all."""
    expected = f"at most {MOST_PLANNED_ITEMS} tile counts of at least 1, of {most} tiles in all"
    if number_of(given) > MOST_PLANNED_ITEMS:
        raise InputError(f"{name}: expected {expected}; got {number_of(given)} counts")
    counts = [count for (count,) in integer_rows(given, name, 1, expected)]
    if any(count < 1 for count in counts) or sum(counts) > most:
        raise InputError(f"{name}: expected {expected}; got {shown(counts)}")
    return counts


# --- `fxsplit::tiles` tells the backend, inside a graph, what a budget of a dense tower counts.
#
# Without it a budget would count tiles (rows of the batch) there, and output tokens in the manager.

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "tiles(Tensor pixel_values, int tokens_per_tile, int max_tiles, bool declared=False) -> Tensor[]"
)


def _copy(pixel_values: Tensor, tokens_per_tile: int, max_tiles: int, declared: bool = False) -> list[Tensor]:
    """Under other backends: an op may not return its own input."""
    return [pixel_values.clone()]


_library.impl("tiles", _copy, "CompositeExplicitAutograd")


def _fake(pixel_values: Tensor, tokens_per_tile: int, max_tiles: int, declared: bool = False) -> list[Tensor]:
    return [torch.empty_like(pixel_values)]


torch.library.register_fake("fxsplit::tiles", _fake, lib=_library)

tiles = torch.ops.fxsplit.tiles.default

register_host_op(
    tiles,
    HostOp(
        run=lambda pixel_values, tokens_per_tile, max_tiles, declared=False: [pixel_values],
        declares_padding=lambda pixel_values, tokens_per_tile, max_tiles, declared=False: declared,
        budgets=BudgetDeclaration(
            rows_per_output_token=lambda pixel_values, tokens_per_tile, max_tiles, declared=False: Fraction(
                1, tokens_per_tile
            ),
            budget_range=lambda pixel_values, tokens_per_tile, max_tiles, declared=False: (
                tokens_per_tile,
                tokens_per_tile * max_tiles,
            ),
        ),
    ),
)
