"""The items of a packed tower: what its inputs say of every image and video.

`mm_kwargs` are what Hugging Face's processors make: `pixel_values` (patches, features) with `image_grid_thw`
(images, 3), and `pixel_values_videos` with `video_grid_thw`. Items are the images in order, then the videos.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.protocol import EncoderItemSpec
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.base import WrappedTower
from fxsplit_encoder.towers.rows import one_or_several, rows_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fxsplit_encoder.towers.grid import Grid

_EMBEDDINGS = ("image_embeds", "video_embeds")


class PackedItems(WrappedTower):
    """Reads grids and patches, counts them, and selects some items.

    Args:
        tower: the vision tower.
        merge_size: patches that merge into one output token along each side.
        patch_features: columns of a flattened patch.
    """

    input_keys: ClassVar[tuple[tuple[str, str], ...]] = (
        ("pixel_values", "image_grid_thw"),
        ("pixel_values_videos", "video_grid_thw"),
    )
    """What the processor calls the patches and the grids: those of images, then those of videos if the tower
    takes any."""

    def __init__(self, tower: nn.Module, *, merge_size: int, patch_features: int) -> None:
        super().__init__(tower)
        self.merge_size = merge_size
        self.rows_per_token: int = merge_size**2
        self.patch_features = patch_features

    def read_grids(self, grids: Any, name: str) -> list[Grid]:
        """A batch's grids as numbers; raises InputError for grids that this tower does not take."""
        return grids_of.read_grids(grids, self.merge_size, name)

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """ "video" if there are videos, else "image"."""
        return "video" if mm_kwargs.get("video_grid_thw") is not None else "image"

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """The patches and output tokens of every item."""
        return [
            EncoderItemSpec(input_size=t * h * w, output_tokens=t * h * w // self.rows_per_token)
            for t, h, w in self.item_grids(mm_kwargs)
        ]

    def item_modalities(self, mm_kwargs: dict[str, Any]) -> list[str]:
        """ "image" or "video" for every item."""
        return [
            modality
            for modality, (_, key) in zip(("image", "video"), self.input_keys, strict=False)
            if mm_kwargs.get(key) is not None
            for _ in range(len(mm_kwargs[key]))
        ]

    def item_frames(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """The grid frames of every item; an image has one."""
        return [t for t, _, _ in self.item_grids(mm_kwargs)]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some items, in the order of `indices`."""
        grids = self.item_grids(mm_kwargs)
        starts = grids_of.cumulative_lengths([t * h * w for t, h, w in grids]).tolist()
        pixels, num_images = self.pixels(mm_kwargs), self.item_modalities(mm_kwargs).count("image")
        images = list(itertools.takewhile(lambda index: index < num_images, indices))
        videos = indices[len(images) :]
        if min(videos, default=num_images) < num_images:
            # In an order that the keys cannot tell; a video is an image of frames.
            images, videos = indices, []
        selected: dict[str, Any] = {}
        for items, (key, grid_key) in zip((images, videos), self.input_keys, strict=False):
            if items:
                selected[key] = one_or_several(rows_of(pixels, starts, items))
                selected[grid_key] = [grids[index] for index in items]
        return selected

    def item_grids(self, mm_kwargs: dict[str, Any]) -> list[Grid]:
        """The grids of a batch: the images', then the videos'.

        Raises:
            InputError: a grid is not one of this tower, the items are embeddings already, or videos for a
                tower of images.
        """
        if len(self.input_keys) == 1:
            self.refuse_videos(mm_kwargs)
        for key in _EMBEDDINGS:
            if mm_kwargs.get(key) is not None:
                raise InputError(
                    f"{key}: these are embeddings already, expected pixels; leave them out and encode the "
                    "other items"
                )
        return [
            grid
            for _, key in self.input_keys
            if mm_kwargs.get(key) is not None
            for grid in self.read_grids(mm_kwargs[key], key)
        ]

    def pixels(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """The patches of a batch, as they were given but flat: their rows follow one another.

        Raises:
            InputError: they are not those that the grids describe, or of another size.
        """
        parts: list[Tensor] = []
        for key, grid_key in self.input_keys:
            value, grid = mm_kwargs.get(key), mm_kwargs.get(grid_key)
            given = [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)
            given = [tensor.flatten(1) if tensor.dim() > 2 else tensor for tensor in given]
            for tensor in given:
                if tensor.dim() != 2 or tensor.shape[1] != self.patch_features:
                    raise InputError(
                        f"{key}: expected (patches, {self.patch_features}); got {tuple(tensor.shape)}; "
                        "pass the flattened patches that the tower's image processor makes"
                    )
            rows = sum(tensor.shape[0] for tensor in given)
            grids = [] if grid is None else self.read_grids(grid, grid_key)
            expected = grids_of.count_patches(grids)
            if rows != expected:
                raise InputError(f"{key}: {grid_key} describes {expected} patches; got {rows} rows")
            parts += given
        return parts or [torch.zeros(0, self.patch_features)]
