"""Towers that see an image twice, as a whole and as crops of another size: the common part of their adapters.

The two views are two paths, captured apart: "global" for whole images, "local" for crops. Each has square
tiles of one size, which never see one another; a tile makes a fixed number of output rows, and budgets count
those. The rows of an image's tiles are put together after the replays.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from fxsplit_encoder.towers.base import WrappedTower
from fxsplit_encoder.towers.models.folded import refresh_tables, tables_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

CropGrid = tuple[int, int]
"""(columns, rows) of an image's crops; (0, 0) without any."""


@dataclass(frozen=True)
class View:
    """The tiles of one path."""

    input_name: str
    """Where `mm_kwargs` holds them, (tiles, 3, size, size), and the name of the captured buffer."""
    size: int
    """Pixels a side."""
    patches: int
    """Patches of a tile, which attend to one another."""
    tokens: int
    """Output rows of a tile."""


class TiledTower(WrappedTower):
    """A tower with two views behind the manager's protocol, and still a module with the tower's own forward.

    Every image has one tile in the "global" view and any number in the "local" one. `mm_kwargs` holds the
    whole images in order, and the crops of all images one after the other (left out where no image has any).

    An adapter gives `crop_grids`, `select_grids`, `encode`, and where an image is more than the rows of its
    tiles, `num_tokens` and `assemble`.
    """

    tower: Any
    max_images: ClassVar[int] = 8
    """The largest batch worth capturing, in whole images."""

    def __init__(self, tower: nn.Module, *, whole: View, crop: View, out_hidden_size: int) -> None:
        super().__init__(tower)
        self.views = {"global": whole, "local": crop}
        self.out_hidden_size = out_hidden_size
        self.fold_tables()
        self.register_forward_pre_hook(_mark_dynamic)

    def fold_tables(self) -> None:
        """Finds the tables to keep up to date; an adapter that adds some calls it again."""
        self._tables = tables_of(self)

    # --- what an adapter gives

    @abstractmethod
    def crop_grids(self, mm_kwargs: dict[str, Any]) -> list[CropGrid]:
        """The crops of every image."""

    @abstractmethod
    def select_grids(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The inputs that say how the images `indices` are cropped."""

    @abstractmethod
    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """(tiles, 3, size, size) of one view to (tiles * tokens, out_hidden_size): what is traced."""

    def num_tokens(self, crops: CropGrid) -> int:
        """Rows of an image's embedding."""
        return self.views["global"].tokens + crops[0] * crops[1] * self.views["local"].tokens

    def assemble(self, whole: Tensor, tiles: Tensor, crops: CropGrid) -> Tensor:
        """The embedding of an image, in memory of its own.

        Args:
            whole: (tokens, hidden), the rows of the whole image.
            tiles: (columns * rows * tokens, hidden), those of its crops, which come row by row.
            crops: how many columns and rows of crops.
        """
        return torch.cat((tiles, whole))

    # --- the module

    def forward(self, pixel_values: Tensor) -> Any:
        """The tower's forward on the tiles of one view, with the tower's own output type."""
        return self.tower(pixel_values)

    def example_inputs(self) -> tuple[Tensor]:
        """Two whole images. (One would be traced as a constant.)"""
        size = self.views["global"].size
        return (torch.randn(2, 3, size, size, device=self.device, dtype=self.dtype),)

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What a capture of this tower needs."""
        return EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=[view.input_name for view in self.views.values()],
            out_hidden_size=self.out_hidden_size,
            paths={
                path: EncoderCudaGraphPathConfig(view.tokens, allow_zero_tokens=path == "local")
                for path, view in self.views.items()
            },
        )

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """Always "image"."""
        return "image"

    def get_max_frames_per_video(self) -> int:
        """1: there are no videos."""
        return 1

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """The rows of one whole image, and of the largest batch of them."""
        tokens = self.views["global"].tokens
        return tokens, self.max_images * tokens

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """The patches and output rows of every image, and the rows that each path makes of it."""
        whole, crop = self.views["global"], self.views["local"]
        specs = []
        for grid in self.crop_grids(mm_kwargs):
            tiles = grid[0] * grid[1]
            paths = {"global": whole.tokens, "local": tiles * crop.tokens}
            specs.append(EncoderItemSpec(whole.patches + tiles * crop.patches, self.num_tokens(grid), paths))
        return specs

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some images, in the order of `indices`."""
        grids = self.crop_grids(mm_kwargs)
        starts = [0]
        for columns, rows in grids:
            starts.append(starts[-1] + columns * rows)
        whole, crop = (self.tiles(mm_kwargs, path) for path in ("global", "local"))
        crops = [crop[starts[i] : starts[i + 1]] for i in indices]
        return {
            **self.select_grids(mm_kwargs, indices),
            self.views["global"].input_name: whole[indices],
            self.views["local"].input_name: torch.cat(crops) if crops else crop[:0],
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: tuple[Hashable, ...] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        """As many tiles as fit a budget.

        Raises:
            InputError: not even one does.
        """
        refresh_tables(self._tables)
        view = self.views[path]
        if token_budget < view.tokens:
            raise InputError(
                f"path {path}: a budget of {token_budget} tokens holds no tile, which has {view.tokens}; "
                f"list larger ones under paths.{path}.token_budgets"
            )
        shape = (token_budget // view.tokens, 3, view.size, view.size)
        return EncoderCudaGraphCaptureInputs(
            {view.input_name: torch.randn(shape, device=device, dtype=dtype)}
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The tiles of a batch in one view."""
        refresh_tables(self._tables)
        return EncoderCudaGraphReplayBuffers({self.views[path].input_name: self.tiles(mm_kwargs, path)})

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """The forward of one view: what is traced and captured."""
        return self.encode(inputs[self.views[path].input_name], path)

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        """The same rows without a capture."""
        refresh_tables(self._tables)
        return self.encode(self.tiles(mm_kwargs, path).to(self.device, self.dtype), path)

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, Tensor] | list[Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Puts every image together from its rows on the two paths. What it hands out is always a copy."""
        assert batch_mm_kwargs is not None
        whole = outputs["global"]
        crop = outputs.get("local", whole[:0])
        start = 0
        tokens = {path: view.tokens for path, view in self.views.items()}
        for number, (index, grid) in enumerate(zip(indices, self.crop_grids(batch_mm_kwargs), strict=True)):
            end = start + grid[0] * grid[1] * tokens["local"]
            rows = whole[number * tokens["global"] : (number + 1) * tokens["global"]]
            dest[index] = self.assemble(rows, crop[start:end], grid)
            start = end

    # --- inputs

    def tiles(self, mm_kwargs: dict[str, Any], path: str) -> Tensor:
        """The tiles of a view.

        Raises:
            InputError: there are more or fewer of them than the images have, or they have another shape.
        """
        view = self.views[path]
        grids = self.crop_grids(mm_kwargs)
        expected = len(grids) if path == "global" else sum(columns * rows for columns, rows in grids)
        tiles = mm_kwargs.get(view.input_name)
        if expected == 0:
            # Processors fill the place of crops that do not exist with zeros.
            return torch.zeros(0, 3, view.size, view.size) if tiles is None else tiles[:0]
        shape = (expected, 3, view.size, view.size)
        if tiles is None or tuple(tiles.shape) != shape:
            raise InputError(
                f"{view.input_name}: expected {shape} for {len(grids)} images; got "
                f"{None if tiles is None else tuple(tiles.shape)}; pass what the model's processor makes at "
                f"{view.size} pixels"
            )
        return tiles  # type: ignore[no-any-return]


def read_counts(values: Any, name: str, length: int) -> list[tuple[int, ...]]:
    """Rows of `length` non-negative integers, from a tensor, an array or nested sequences.

    Raises:
        InputError: anything else.
    """
    listed = values.tolist() if hasattr(values, "tolist") else values
    numbers = [row.tolist() if hasattr(row, "tolist") else row for row in listed]
    rows = [tuple(row) if isinstance(row, list | tuple) else (row,) for row in numbers]
    for row in rows:
        if len(row) != length or not all(isinstance(n, int) and n >= 0 for n in row):
            raise InputError(f"{name}: expected {length} non-negative integers for each image; got {row}")
    return rows


def crops_in_a_row(mm_kwargs: dict[str, Any], name: str, whole_name: str) -> list[CropGrid]:
    """The crops of every image where only their number matters.

    Args:
        mm_kwargs: the batch.
        name: where it holds the number of crops of every image; without it, no image has any.
        whole_name: where it holds the whole images.
    """
    counts = mm_kwargs.get(name)
    if counts is not None:
        return [(count, 1) if count else (0, 0) for (count,) in read_counts(counts, name, 1)]
    whole = mm_kwargs.get(whole_name)
    return [] if whole is None else [(0, 0)] * len(whole)


def downsampled(side: int) -> int:
    """Positions a side behind a convolution of 3 x 3 with stride 2 and padding 1."""
    return (side + 1) // 2


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mark_dynamic(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tells Dynamo, before it traces, that the number of tiles varies; folds tables outside of the trace."""
    assert isinstance(module, TiledTower)
    refresh_tables(module._tables)
    if not args or not isinstance(args[0], torch.Tensor) or args[0].dim() != 4 or args[0].shape[0] < 2:
        return args
    tiles = args[0].view_as(args[0])
    torch._dynamo.mark_dynamic(tiles, 0)
    for dim in range(1, 4):
        torch._dynamo.mark_static(tiles, dim)
    return (tiles, *args[1:])
