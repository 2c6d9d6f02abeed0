"""Adapters of towers of tiles: `DenseTower` for tiles of one size, `TiledTower` for whole images and crops. A
tile is a row of a batch, attends to no other tile and gives a fixed number of output rows. Tiles of another
size are another path, captured separately.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from fxsplit_encoder._torch.dispatch import check, define_op
from fxsplit_encoder._torch.dynamo import Marks
from fxsplit_encoder.caching import read_once
from fxsplit_encoder.capture.inputs import example_values
from fxsplit_encoder.compile.options import HostOp, register_host_op
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown
from fxsplit_encoder.protocol import (
    BudgetDeclaration,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from fxsplit_encoder.towers.base import VIDEOS, WrappedTower
from fxsplit_encoder.towers.folded import FoldedTables
from fxsplit_encoder.towers.grid import cumulative_lengths
from fxsplit_encoder.towers.inputs import (
    MOST_PLANNED_ITEMS,
    MOST_ROWS,
    check_pixels,
    integer_rows,
    number_of,
    one_or_several,
    pixel_parts,
    rows_of,
)

# torch 2.11 compares the sizes of a mask with 1 while it traces, which it cannot do with a size not known.
MASKED_ATTENTION_TAKES_UNKNOWN_SIZES = TorchVersion(torch.__version__) >= "2.13"


@dataclass(frozen=True)
class View:
    """The tiles of one path."""

    input_name: str
    """Their key in `mm_kwargs`, (tiles, channels, height, width), and the name of the captured buffer."""
    shape: tuple[int, ...]
    """Channels, height and width of a tile; of a piece of audio its mel bins and frames."""
    tokens: int
    """Output rows of a tile."""
    input_size: int = 1
    """Patches of a tile, added to its item's `input_size`."""


class TileTower(WrappedTower):
    """The base of both, with the tiles of every path as `views`; the module's own forward takes those of the
    first, of the others an item may have none. A subclass gives `encode`, `tiles`, and the sizes of items.
    """

    attends_with_mask: bool = False
    """Whether `scaled_dot_product_attention` gets a mask or a bias of each tile's own."""
    max_tiles: ClassVar[int]
    """The largest batch worth capturing, in tiles of the first path."""

    def __init__(
        self,
        tower: nn.Module,
        views: Mapping[str, View],
        out_hidden_size: int,
        children: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__(tower, children)
        self.views = dict(views)
        self.input_names = (self.first_view.input_name,)
        self.out_hidden_size = out_hidden_size

    def traced_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An alias of the tiles, marked for Dynamo as of varying number; also folds tables."""
        self._tables.refresh()
        name = self.first_view.input_name
        if name in kwargs:
            kwargs = dict(kwargs)
            args = (kwargs.pop(name), *args)
        if not args:
            return args, kwargs
        tiles, *others = args
        check_pixels(tiles, name)
        if tiles.dim() != 1 + len(self.first_view.shape):
            is_audio = len(self.first_view.shape) == 2
            expected = "pieces, mel bins, frames" if is_audio else "tiles, channels, height, width"
            raise InputError(f"{name}: expected ({expected}); got {tuple(tiles.shape)}")
        if tiles.shape[0] > 0:
            traced_apart = self.attends_with_mask and not MASKED_ATTENTION_TAKES_UNKNOWN_SIZES
            tiles = (_ONE_TILE_APART if traced_apart else _TILES).on_alias(tiles)
        return (tiles, *others), kwargs

    @functools.cached_property
    def _tables(self) -> FoldedTables:
        return FoldedTables(self)

    def outdate_tables(self) -> None:
        """Has the next call compute the tables again, see `fxsplit_encoder.refresh`."""
        self._tables.outdate()

    @property
    def first_view(self) -> View:
        """The tiles of the module's own forward."""
        return next(iter(self.views.values()))

    # --- methods of adapters

    @abstractmethod
    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """(tiles, channels, height, width) of one path to (tiles * tokens, out_hidden_size), as traced."""

    @abstractmethod
    def tiles(self, mm_kwargs: dict[str, Any], path: str) -> list[Tensor]:
        """The tiles of a batch on a path; InputError for contradicting inputs or another shape."""

    # --- the module

    def example_inputs(self) -> tuple[Tensor]:
        """One tile."""
        return (example_values((1, *self.first_view.shape), self.device, self.dtype),)

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """The constants of a capture of this tower."""
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
            buffer_keys=[view.input_name for view in self.views.values()],
            out_hidden_size=self.out_hidden_size,
            max_frames_per_video=self.max_frames_per_video,
            paths={
                path: EncoderCudaGraphPathConfig(view.tokens, allow_zero_tokens=view is not self.first_view)
                for path, view in self.views.items()
            },
        )

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """The output tokens of one tile, and those of the largest batch worth capturing."""
        tokens = self.first_view.tokens
        return tokens, tokens * self.max_tiles

    def capture_values(
        self, path: str, token_budget: int, frames: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """As many whole tiles as a budget holds; InputError if it holds none."""
        self._tables.refresh()
        view = self.views[path]
        count = token_budget // view.tokens
        if count < 1:
            field = "token_budgets" if path == "default" else f"paths.{path}.token_budgets"
            raise InputError(
                f"{field}: {token_budget} has no room for a tile of {type(self.tower).__name__}; expected "
                f"multiples of its {view.tokens} output tokens"
            )
        return {view.input_name: example_values((count, *view.shape), device, dtype)}

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The batch's tiles on a path."""
        self._tables.refresh()
        tiles = one_or_several(self.tiles(mm_kwargs, path))
        return EncoderCudaGraphReplayBuffers({self.views[path].input_name: tiles})

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """The traced and captured forward: (tiles * tokens, out_hidden_size)."""
        return self.encode(inputs[self.views[path].input_name], path)

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        """The same rows without a capture."""
        self._tables.refresh()
        return self.encode(torch.cat(self.tiles(mm_kwargs, path)).to(self.device, self.dtype), path)


# One tile is a number of tiles like any other: a backed size of 1 would be specialized.
_TILES, _ONE_TILE_APART = Marks("unbacked"), Marks("maybe")


VIDEO_COUNTS = "video_num_patches"


class DenseTower(TileTower):
    """A tower of tiles of one size. An adapter gives `features`, and `call` if that is not the tower's own
    forward. Attention is torch's dense one, which is faster for equal segments.

    `mm_kwargs` hold the tiles of all images, `pixel_values` (tiles, channels, height, width), and
    `num_patches` or `image_num_patches`, the tiles of every image; without it every tile is an image. Frames
    of videos are tiles too, in `pixel_values_videos`: (videos, frames, channels, height, width), a list of
    (frames, ...), or one tensor with `video_num_patches`. Items are the images, then the videos.

    Args:
        tower, children: as of `WrappedTower`.
        view: the tiles; its `input_name` is also the name of the forward's first argument.
        out_hidden_size: columns of the output.
    """

    count_keys: ClassVar[tuple[str, ...]] = ("num_patches", "image_num_patches")
    """Keys in `mm_kwargs` of the tiles of every image."""
    max_tiles: ClassVar[int] = 16

    def __init__(
        self,
        tower: nn.Module,
        view: View,
        out_hidden_size: int,
        children: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__(tower, {"default": view}, out_hidden_size, children)
        if "video" in self.modalities:
            self.max_frames_per_video = self.max_tiles  # a frame is a tile
        self.input_name, self.tile_shape, self.tokens_per_tile = view.input_name, view.shape, view.tokens

    # --- methods of adapters

    @abstractmethod
    def features(self, tiles: Tensor) -> Tensor:
        """(tiles, tokens_per_tile, out_hidden_size) from (tiles, channels, height, width)."""

    def call(self, tiles: Tensor) -> Any:
        """The wrapped module's own forward, with its own output type."""
        return self.tower(tiles)

    # --- the module

    def forward(self, pixel_values: Tensor) -> Any:
        """The wrapped module's own forward; a call with options that change the output runs that module."""
        if torch.compiler.is_compiling():
            # InternVL's reshape to -1 divides by the number of tiles.
            check(pixel_values.shape[0] > 0)
            pixel_values = tiles(pixel_values, self.tokens_per_tile, self.max_tiles, self.declares_padding)[0]
            self.trace_plain_blocks_once()
        return self.call(pixel_values)

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """(tiles * tokens_per_tile, out_hidden_size) from tiles; InputError for other sizes than declared."""
        features = self.features(tiles)
        expected = (self.tokens_per_tile, self.out_hidden_size)
        if features.dim() != 3 or tuple(features.shape[1:]) != expected:
            raise InputError(
                f"{type(self.tower).__name__}: expected features of (tiles, {expected[0]}, {expected[1]}); "
                f"got {tuple(features.shape)}"
            )
        return features.flatten(0, 1)

    # --- the manager's protocol

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Tiles and output tokens of every item; tiles may be missing. InputError if inputs disagree."""
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
        """Returns the tiles of every item of a plan without tiles; None if there are tiles, or no counts."""
        takes_videos = "video" in self.modalities
        tiles = (self.input_name, VIDEOS)
        given = {self.count_keys[0]: self.image_counts(mm_kwargs)}
        if takes_videos:
            given[VIDEO_COUNTS] = mm_kwargs.get(VIDEO_COUNTS)
        given = {name: counts for name, counts in given.items() if counts is not None}
        if not given or any(mm_kwargs.get(name) is not None for name in tiles):
            return None
        most, counts = MOST_ROWS // self.tokens_per_tile, list[int]()
        expected = f"at most {MOST_PLANNED_ITEMS} tile counts of at least 1, of {most} tiles in all"
        for name, own in given.items():
            counts += _positive_counts(name, own, expected, MOST_PLANNED_ITEMS, range(most + 1))
        return counts

    def _read(self, mm_kwargs: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
        """The tiles of a batch, and how many every item has: the images', then the videos'."""
        return read_once(self, mm_kwargs, lambda: self._read_request(mm_kwargs))

    def _read_request(self, mm_kwargs: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
        takes_videos = "video" in self.modalities
        self.check_given(mm_kwargs, (self.input_name, VIDEOS) if takes_videos else (self.input_name,))
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
    return _positive_counts(name, given, expected, total, range(total, total + 1))


def _positive_counts(name: str, given: Any, expected: str, most: int, totals: range) -> list[int]:
    """At most `most` positive integers that add up to one of `totals`, else InputError."""
    if number_of(given) > most:
        raise InputError(f"{name}: expected {expected}; got {number_of(given)} counts")
    counts = [count for (count,) in integer_rows(given, name, 1, expected)]
    if any(count < 1 for count in counts) or sum(counts) not in totals:
        raise InputError(f"{name}: expected {expected}; got {shown(counts)}")
    return counts


# --- `fxsplit::tiles` declares a dense tower's budgets inside a graph, so that they count output tokens
# in the backend too, not rows of the batch.


def _copy(pixel_values: Tensor, tokens_per_tile: int, max_tiles: int, declared: bool = False) -> list[Tensor]:
    """Under other backends: an op may not return its own input."""
    return [pixel_values.clone()]


tiles = define_op(
    "tiles(Tensor pixel_values, int tokens_per_tile, int max_tiles, bool declared=False) -> Tensor[]",
    {"CompositeExplicitAutograd": _copy},
    lambda pixels, tokens, most, declared=False: [torch.empty_like(pixels)],
)

register_host_op(
    tiles,
    HostOp(
        run=lambda pixels, tokens, most, declared=False: [pixels],
        declares_padding=lambda pixels, tokens, most, declared=False: declared,
        budgets=BudgetDeclaration(
            rows_per_output_token=lambda pixels, tokens, most, declared=False: Fraction(1, tokens),
            budget_range=lambda pixels, tokens, most, declared=False: (tokens, tokens * most),
        ),
    ),
)


# --- two views


CropGrid = tuple[int, int]
"""(columns, rows) of an image's crops; (0, 0) without any."""


class TiledTower(TileTower):
    """A tower that encodes an image whole, one tile on the path "global", and as any number of crops of
    another size, on "local". An image's embedding is assembled after the replays.

    `mm_kwargs` holds the whole images, and the crops of all in one tensor or one entry an image, which may be
    None, empty or a tile of zeros. An adapter gives `count_key` and `encode`; `crop_grids` and `select_grids`
    if crops are no row, and `num_tokens` and `assemble` if an image is more than its tiles' rows.
    """

    assembles = True
    max_tiles: ClassVar[int] = 8
    count_key: ClassVar[str]
    """The key in `mm_kwargs` of the number of crops of every image."""

    # --- methods of adapters

    def crop_grids(self, mm_kwargs: dict[str, Any]) -> list[CropGrid]:
        """The crops of every image, by default in a row, by their number; none if it is left out."""
        counts = mm_kwargs.get(self.count_key)
        if counts is not None:
            rows = read_counts(counts, self.count_key, 1)
            return [(count, 1) if count else (0, 0) for (count,) in rows]
        name = self.first_view.input_name
        return [(0, 0)] * sum(part.shape[0] for part in pixel_parts(mm_kwargs.get(name), name))

    def select_grids(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The inputs that describe how the images `indices` are cropped."""
        grids = self.crop_grids(mm_kwargs)
        return {self.count_key: [grids[i][0] for i in indices]}

    def num_tokens(self, crops: CropGrid) -> int:
        """Rows of an image's embedding."""
        return self.views["global"].tokens + crops[0] * crops[1] * self.views["local"].tokens

    def assemble(self, whole: Tensor, tiles: Tensor, crops: CropGrid) -> Tensor:
        """The embedding of an image, in its own memory, from (tokens, hidden) of the whole image and (columns
        * rows * tokens, hidden) of its crops, row by row.
        """
        return torch.cat((tiles, whole))

    # --- the module

    def forward(self, pixel_values: Tensor) -> Any:
        """The tower's forward on the tiles of one view, with the tower's own output type."""
        self.trace_plain_blocks_once()
        return self.tower(pixel_values)

    # --- the manager's protocol

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Patches and output rows of every image, and the rows of each path. The tiles of all views may be
        missing. InputError if the inputs contradict one another, or there are videos.
        """
        names = [view.input_name for view in self.views.values()]
        self.check_given(mm_kwargs, [*names, self.count_key])
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

    def assembled(
        self, outputs: dict[str, Tensor], mm_kwargs: dict[str, Any], clone: bool
    ) -> Iterator[Tensor]:
        """The images from their rows on both paths, always in a copy."""
        whole = outputs["global"]
        crop = outputs.get("local", whole[:0])
        tokens = {path: view.tokens for path, view in self.views.items()}
        start = 0
        for number, grid in enumerate(self.crop_grids(mm_kwargs)):
            end = start + grid[0] * grid[1] * tokens["local"]
            rows = whole[number * tokens["global"] : (number + 1) * tokens["global"]]
            yield self.assemble(rows, crop[start:end], grid)
            start = end

    # --- inputs

    def tiles(self, mm_kwargs: dict[str, Any], path: str) -> list[Tensor]:
        """The tiles of a view; InputError for another number or shape than the images have."""
        return self._tiles_of(mm_kwargs, path, self._read_grids(mm_kwargs))

    def _read_grids(self, mm_kwargs: dict[str, Any]) -> list[CropGrid]:
        """The crops of every image; InputError for more images than whole ones, or than a plan takes."""
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
            if mm_kwargs.get(self.count_key) is None and any(part.shape[0] for part in tiles):
                raise InputError(
                    f"{self.count_key}: expected the crops of every image in {view.input_name}; got None"
                )
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


def read_counts(values: Any, name: str, length: int) -> list[tuple[int, ...]]:
    """Rows of `length` non-negative integers from a tensor, an array or nested sequences, else InputError."""
    expected = f"{length} non-negative integers for each image"
    rows = integer_rows(values, name, length, expected)
    for row in rows:
        if min(row) < 0:
            raise InputError(f"{name}: expected {expected}; got {row}")
    return rows


def _real_crops(given: Any, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The crops of images without placeholders: None, an empty tensor, or a tile of zeros. `given` is a
    tensor, or tensors for each image, `parts` the same without None, `counts` the crops of every image.
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
