"""Towers that encode tiles of one fixed size, each alone: the common part of their adapters.

`mm_kwargs` hold the tiles of all images one after the other, `pixel_values` (tiles, channels, height, width),
and `num_patches` or `image_num_patches`, the tiles of every image; without it every tile is an image. Towers
that take videos find them in `pixel_values_videos`, whose frames are tiles: (videos, frames, channels,
height, width), a list of (frames, channels, height, width), or one such tensor for all videos with
`video_num_patches`, the frames of each. Items are the images in order, then the videos.
"""

from __future__ import annotations

from abc import abstractmethod
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from fxsplit_encoder.towers.base import WrappedTower
from fxsplit_encoder.towers.grid import cumulative_lengths
from fxsplit_encoder.towers.rows import one_or_several, rows_of
from fxsplit_encoder.towers.tiles_op import tiles

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor, nn

_VIDEOS = "pixel_values_videos"
_VIDEO_COUNTS = "video_num_patches"


class DenseTower(WrappedTower):
    """A tower of tiles behind the manager's protocol. An adapter gives `features` and `call`.

    Tiles never attend to one another, so they are the rows of a batch: the tower's attention stays torch's
    dense one, which for equal segments is faster than one with cumulative lengths.

    Args:
        tower: the vision tower, whose parameters say on which device and in which dtype it computes.
        tile_shape: channels, height and width of a tile.
        tokens_per_tile: rows of output that a tile gives.
        out_hidden_size: columns of the output.
        input_name: the tiles' key in `mm_kwargs`.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    count_keys: ClassVar[tuple[str, ...]] = ("num_patches", "image_num_patches")
    """Where `mm_kwargs` may have the tiles of every image."""
    max_tiles: ClassVar[int] = 16
    """The largest batch worth capturing."""

    def __init__(
        self,
        tower: nn.Module,
        *,
        tile_shape: tuple[int, int, int],
        tokens_per_tile: int,
        out_hidden_size: int,
        input_name: str = "pixel_values",
    ) -> None:
        super().__init__(tower)
        self.tile_shape = tile_shape
        self.tokens_per_tile = tokens_per_tile
        self.out_hidden_size = out_hidden_size
        self.input_name = input_name
        self.register_forward_pre_hook(_mark_dynamic, with_kwargs=True)

    # --- what an adapter gives

    @abstractmethod
    def features(self, tiles: Tensor) -> Tensor:
        """(tiles, tokens_per_tile, out_hidden_size) from (tiles, channels, height, width)."""

    @abstractmethod
    def call(self, tiles: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own forward, with its own options and output type."""

    # --- the module

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own forward: tiles first, its options, its output."""
        if torch.compiler.is_compiling():
            pixel_values = tiles(pixel_values, self.tokens_per_tile, self.max_tiles)[0]
        return self.call(pixel_values, *args, **kwargs)

    def example_inputs(self) -> tuple[Tensor]:
        """One tile."""
        return (torch.randn(1, *self.tile_shape, device=self.device, dtype=self.dtype),)

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What a capture of this tower needs."""
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
            buffer_keys=[self.input_name],
            out_hidden_size=self.out_hidden_size,
            max_frames_per_video=self.get_max_frames_per_video(),
        )

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """ "video" if there are videos, else "image"."""
        return "video" if mm_kwargs.get(_VIDEOS) is not None else "image"

    def get_max_frames_per_video(self) -> int:
        """Frames of the longest video that a budget holds; they are tiles."""
        return self.max_tiles if "video" in self.modalities else 1

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """The output tokens of one tile, and those of the largest batch worth capturing."""
        return self.tokens_per_tile, self.tokens_per_tile * self.max_tiles

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """The tiles and output tokens of every item."""
        return [
            EncoderItemSpec(input_size=count, output_tokens=count * self.tokens_per_tile)
            for count in self._read(mm_kwargs)[1]
        ]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some items, in the order of `indices`."""
        pixels, counts = self._read(mm_kwargs)
        selected = one_or_several(rows_of(pixels, cumulative_lengths(counts).tolist(), indices))
        return {self.input_name: selected, self.count_keys[0]: [counts[i] for i in indices]}

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
        """As many whole tiles as a budget holds.

        Raises:
            InputError: it holds none.
        """
        count = token_budget // self.tokens_per_tile
        if count < 1:
            raise InputError(
                f"token_budgets: {token_budget} has no room for a tile of {type(self.tower).__name__}; "
                f"expected multiples of its {self.tokens_per_tile} output tokens"
            )
        pixels = torch.randn(count, *self.tile_shape, device=device, dtype=dtype)
        return EncoderCudaGraphCaptureInputs({self.input_name: pixels})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The batch's tiles."""
        return EncoderCudaGraphReplayBuffers({self.input_name: one_or_several(self._read(mm_kwargs)[0])})

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """(tiles * tokens_per_tile, out_hidden_size): what is traced and captured.

        Raises:
            InputError: the tower's output has other sizes than it was said to have.
        """
        features = self.features(inputs[self.input_name])
        expected = (self.tokens_per_tile, self.out_hidden_size)
        if features.dim() != 3 or tuple(features.shape[1:]) != expected:
            raise InputError(
                f"{type(self.tower).__name__}: expected features of (tiles, {expected[0]}, {expected[1]}); "
                f"got {tuple(features.shape)}"
            )
        return features.flatten(0, 1)

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        """The same features without a capture."""
        pixels = torch.cat(self._read(mm_kwargs)[0]).to(self.device, self.dtype)
        return self.encoder_cudagraph_forward({self.input_name: pixels})

    # --- inputs

    def image_counts(self, mm_kwargs: dict[str, Any]) -> Any:
        """The tiles of every image, as numbers in any container; None if nothing says so."""
        return next((mm_kwargs[key] for key in self.count_keys if mm_kwargs.get(key) is not None), None)

    def _read(self, mm_kwargs: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
        """The tiles of a batch, and how many every item has: the images', then the videos'."""
        tensors: list[Tensor] = []
        counts: list[int] = []
        images, videos = mm_kwargs.get(self.input_name), mm_kwargs.get(_VIDEOS)
        if images is not None:
            given = [images] if isinstance(images, torch.Tensor) else images
            tensors += [self._checked(self.input_name, part) for part in given]
            total = sum(part.shape[0] for part in tensors)
            counts += _counts(self.input_name, self.image_counts(mm_kwargs), total)
        if videos is not None:
            clips, frames = self._read_videos(videos, mm_kwargs.get(_VIDEO_COUNTS))
            tensors += clips
            counts += frames
        return tensors or [torch.zeros(0, *self.tile_shape)], counts

    def _read_videos(self, videos: Any, frames: Any) -> tuple[list[Tensor], list[int]]:
        if "video" not in self.modalities:
            raise InputError(f"{_VIDEOS}: {type(self).__name__} takes images only; leave it out")
        if isinstance(videos, list | tuple):
            clips = [self._checked(_VIDEOS, clip) for clip in videos]
            return clips, [clip.shape[0] for clip in clips]
        if videos.dim() == 5:
            return [self._checked(_VIDEOS, videos.flatten(0, 1))], [videos.shape[1]] * videos.shape[0]
        if frames is None:
            raise InputError(
                f"{_VIDEOS}: a tensor of {videos.dim()} dimensions needs {_VIDEO_COUNTS}, their frames; "
                "pass them, or (videos, frames, channels, height, width)"
            )
        return [self._checked(_VIDEOS, videos)], _counts(_VIDEOS, frames, videos.shape[0])

    def _checked(self, name: str, pixels: Tensor) -> Tensor:
        if tuple(pixels.shape[1:]) != self.tile_shape:
            c, h, w = self.tile_shape
            raise InputError(f"{name}: expected (tiles, {c}, {h}, {w}); got {tuple(pixels.shape)}")
        return pixels


def _counts(name: str, given: Any, total: int) -> list[int]:
    """The tiles of every item; one each where nothing is given."""
    if given is None:
        return [1] * total
    listed = given.tolist() if hasattr(given, "tolist") else list(given)
    valid = all(isinstance(count, Integral) and int(count) >= 1 for count in listed)
    if not valid or sum(listed) != total:
        raise InputError(
            f"{name}: expected tile counts of at least 1 that add up to its {total} tiles; got {listed}"
        )
    return [int(count) for count in listed]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mark_dynamic(
    module: DenseTower, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tells Dynamo, before it traces, that the number of tiles varies, so that one trace serves every batch.

    It runs outside of the compiled frame. The marks go on an alias: the caller's tensor stays as it is. Other
    sizes than a tile's are left to the tower.
    """
    if module.input_name in kwargs:
        kwargs = dict(kwargs)
        args = (kwargs.pop(module.input_name), *args)
    if args and isinstance(args[0], torch.Tensor) and args[0].dim() == 4 and args[0].shape[0] > 0:
        pixels = args[0].view_as(args[0])
        # One tile is a number of tiles like any other: a backed size of 1 would be specialised.
        torch._dynamo.decorators.mark_unbacked(pixels, 0, min=1)
        torch._dynamo.mark_static(pixels, [1, 2, 3])
        args = (pixels, *args[1:])
    return args, kwargs
