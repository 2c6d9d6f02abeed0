"""The common part of adapters for towers of tiles. A tile is a row of a batch and gives a fixed number of
output rows; tiles never attend to one another. Tiles of another size are another path, captured apart.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from fxsplit_encoder._torch.dynamo import Marks, mark_static, mark_unbacked, maybe_mark_dynamic
from fxsplit_encoder.capture.inputs import example_values
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphReplayBuffers,
)
from fxsplit_encoder.towers.base import WrappedTower
from fxsplit_encoder.towers.inputs import check_pixels, one_or_several
from fxsplit_encoder.towers.modules.folded import FoldedTables

# torch 2.11 compares the sizes of a mask with 1 while it traces, which it cannot do with a size not known.
MASKED_ATTENTION_TAKES_UNKNOWN_SIZES = TorchVersion(torch.__version__) >= "2.13"


@dataclass(frozen=True)
class View:
    """The tiles of one path."""

    input_name: str
    """Where `mm_kwargs` holds them, (tiles, channels, height, width), and the name of the captured buffer."""
    shape: tuple[int, ...]
    """Channels, height and width of a tile; of a piece of audio its mel bins and frames."""
    tokens: int
    """Output rows of a tile."""
    input_size: int = 1
    """What a tile adds to its item's `input_size`."""
    optional: bool = False
    """Whether an item may have no such tiles."""


class TileTower(WrappedTower):
    """A tower of tiles behind the manager's protocol, and still a module with the tower's own forward. An
    adapter gives `encode`, `tiles`, and the facts of items that the protocol asks for.

    Args:
        tower: the vision tower, whose parameters determine device and dtype.
        views: the tiles of every path; those of the first are what the module's own forward takes.
        out_hidden_size: columns of the output.
        children: as of `WrappedTower`.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image",)
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
        self.fold_tables()

    def traced_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An alias of the tiles, marked for Dynamo as of varying number, so that one trace serves every
        batch; folds tables. Tiles of other sizes are left to the tower.
        """
        self._tables.refresh()
        name = self.first_view.input_name
        if name in kwargs:
            kwargs = dict(kwargs)
            args = (kwargs.pop(name), *args)
        if args:
            _check_tiles(args[0], name, 1 + len(self.first_view.shape))
        if args and args[0].shape[0] > 0:
            traced_apart = self.attends_with_mask and not MASKED_ATTENTION_TAKES_UNKNOWN_SIZES
            marks = _ONE_TILE_APART if traced_apart else _TILES
            args = (marks.on_alias(args[0]), *args[1:])
        return args, kwargs

    def fold_tables(self) -> None:
        """Finds the tables to keep up to date; an adapter that adds some calls it again."""
        self._tables = FoldedTables(self)

    def outdate_tables(self) -> None:
        """Has the next call compute the tables anew, see `fxsplit_encoder.refresh`."""
        self._tables.outdate()

    @property
    def first_view(self) -> View:
        """The tiles that the module's own forward takes."""
        return next(iter(self.views.values()))

    # --- what an adapter gives

    @abstractmethod
    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """(tiles, channels, height, width) of one path to (tiles * tokens, out_hidden_size), as traced."""

    @abstractmethod
    def tiles(self, mm_kwargs: dict[str, Any], path: str) -> list[Tensor]:
        """The tiles of a batch on a path; InputError where inputs contradict one another or have another
        shape.
        """

    # --- the module

    def example_inputs(self) -> tuple[Tensor]:
        """One tile."""
        return (example_values((1, *self.first_view.shape), self.device, self.dtype),)

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What a capture of this tower needs."""
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
            buffer_keys=[view.input_name for view in self.views.values()],
            out_hidden_size=self.out_hidden_size,
            max_frames_per_video=self.get_max_frames_per_video(),
            paths={
                path: EncoderCudaGraphPathConfig(view.tokens, allow_zero_tokens=view.optional)
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
        """The output tokens of one tile, and those of the largest batch worth capturing."""
        tokens = self.first_view.tokens
        return tokens, tokens * self.max_tiles

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
        pixels = example_values((count, *view.shape), device, dtype)
        return EncoderCudaGraphCaptureInputs({view.input_name: pixels})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The batch's tiles on a path."""
        self._tables.refresh()
        tiles = one_or_several(self.tiles(mm_kwargs, path))
        return EncoderCudaGraphReplayBuffers({self.views[path].input_name: tiles})

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """(tiles * tokens, out_hidden_size): what is traced and captured."""
        return self.encode(inputs[self.views[path].input_name], path)

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        """The same rows without a capture."""
        self._tables.refresh()
        return self.encode(torch.cat(self.tiles(mm_kwargs, path)).to(self.device, self.dtype), path)


def _check_tiles(tiles: Any, name: str, dimensions: int) -> None:
    check_pixels(tiles, name)
    if tiles.dim() != dimensions:
        expected = "tiles, channels, height, width" if dimensions == 4 else "pieces, mel bins, frames"
        raise InputError(f"{name}: expected ({expected}); got {tuple(tiles.shape)}")


def _mark_tiles(tiles: Tensor) -> None:
    # One tile is a number of tiles like any other: a backed size of 1 would be specialized.
    mark_unbacked(tiles, 0)
    mark_static(tiles, list(range(1, tiles.dim())))


def _mark_more_tiles(tiles: Tensor) -> None:
    maybe_mark_dynamic(tiles, 0)
    mark_static(tiles, list(range(1, tiles.dim())))


_TILES, _ONE_TILE_APART = Marks(_mark_tiles), Marks(_mark_more_tiles)
