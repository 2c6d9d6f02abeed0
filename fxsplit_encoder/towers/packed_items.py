"""Reads the items of a packed tower from what Hugging Face's processors make: `pixel_values` (patches,
features) with `image_grid_thw` (images, 3), and `pixel_values_videos` with `video_grid_thw`; images first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit_encoder.caching import read_once
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.base import WrappedTower
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.inputs import (
    INTEGERS,
    MOST_PLANNED_ITEMS,
    MOST_ROWS,
    check_given,
    check_pixels,
    number_of,
    one_or_several,
    pixel_parts,
    rows_of,
)

_EMBEDDINGS = ("image_embeds", "video_embeds")


class _Request(NamedTuple):
    """What the inputs of a batch describe, once they have been found to agree."""

    described: Described
    patches: list[Tensor]
    """As they were given; their rows follow one another. Empty where a plan is made without any."""
    is_known: bool
    """Whether another request of the same grids, and of patches alike, gets the same `described`."""


class PackedItems(WrappedTower):
    """Reads grids and patches, counts them, and selects some items.

    Args:
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
        self._known_requests = KnownRequests()

    def read_grids(self, grids: Any, name: str) -> list[Grid]:
        """A batch's grids as numbers; raises InputError for grids that this tower does not take."""
        return grids_of.read_grids(grids, self.merge_size, name)

    # --- reading

    def read_request(self, mm_kwargs: dict[str, Any], *, planned: bool = False) -> _Request:
        """The grids and the patches of a batch. Grids are read once and compared with the rows of patches;
        for a plan (`planned`) patches may be missing.

        Raises:
            InputError: an input is missing or wrong, grids do not describe the patches, or items are not
                pixels.
        """
        request: _Request = read_once(self, mm_kwargs, functools.partial(self._look_up, mm_kwargs))
        if request.described.missing is not None and not planned:
            key, grid_key = request.described.missing
            raise InputError(
                f"{key}: expected the patches that {grid_key} describes; got 0 rows, it is missing"
            )
        return request

    def _look_up(self, mm_kwargs: dict[str, Any]) -> _Request:
        """The same, where patches may be missing. What one like it describes is not read again."""
        seen = look(mm_kwargs, self.input_keys)
        if seen is None:
            return self._read_request(mm_kwargs)
        described = self._known_requests.get(seen.key)
        if described is None:
            try:
                described = self._read_request(seen.inputs).described
            except InputError:
                return self._read_request(mm_kwargs)  # says what is wrong with what was given
            self._known_requests.keep(seen.key, described)
        return _Request(described, seen.patches, True)

    def _read_request(self, mm_kwargs: dict[str, Any]) -> _Request:
        """The same, read."""
        if len(self.input_keys) == 1:
            self.refuse_videos(mm_kwargs)
        for key in _EMBEDDINGS:
            if mm_kwargs.get(key) is not None:
                raise InputError(
                    f"{key}: these are embeddings already, expected pixels; leave them out and encode the "
                    "other items"
                )
        check_given(mm_kwargs, itertools.chain(*self.input_keys), type(self).__name__)
        grids: list[Grid] = []
        counts: list[int] = []
        patches: list[Tensor] = []
        missing = None
        for key, grid_key in self.input_keys:
            own: list[Grid] = []
            if mm_kwargs.get(grid_key) is not None:
                parts, own = self._read_modality(mm_kwargs, key, grid_key)
                patches += parts
                if missing is None and mm_kwargs.get(key) is None:
                    missing = key, grid_key
            grids += own
            counts.append(len(own))
        for key, grid_key in self.input_keys:
            if mm_kwargs.get(key) is not None and mm_kwargs.get(grid_key) is None:
                raise InputError(f"{grid_key}: expected the grids of {key}; got None; pass both or neither")
        return _Request(Described(grids, counts[0], missing), patches, False)

    def _read_modality(
        self, mm_kwargs: dict[str, Any], key: str, grid_key: str
    ) -> tuple[list[Tensor], list[Grid]]:
        """The patches and the grids of all images, or of all videos."""
        patches = mm_kwargs.get(key)
        parts = pixel_parts(patches, key, self.check_patches)
        rows = None if patches is None else sum(part.shape[0] for part in parts)
        return parts, self.grids_of_rows(mm_kwargs[grid_key], grid_key, rows, f"{key}: {grid_key} describes")

    def check_patches(self, patches: Any, name: str) -> None:
        """Raises InputError unless patches are a tensor of (patches, features), in any shape of features."""
        check_pixels(patches, name)
        shape = patches.shape
        if len(shape) < 2 or math.prod(shape[1:]) != self.patch_features:
            raise InputError(
                f"{name}: expected (patches, {self.patch_features}); got {tuple(shape)}; "
                "pass the flattened patches that the tower's image processor makes"
            )

    def grids_of_rows(self, grids: Any, name: str, rows: int | None, claim: str) -> list[Grid]:
        """The grids that describe `rows` rows of patches (None: any number, for a plan), else InputError.
        `name` is where they were found, `claim` how a message begins that goes on with what they describe.
        """
        capacity = MOST_PLANNED_ITEMS if rows is None else rows // self.rows_per_token
        if number_of(grids) > capacity:
            got = "a plan without pixels has capacity" if rows is None else f"got {rows} rows, capacity"
            raise InputError(f"{claim} {number_of(grids)} items; {got} for {capacity} at most")
        result = self.read_grids(grids, name)
        patches = grids_of.count_patches(result)
        if patches > MOST_ROWS and rows is None:
            raise InputError(f"{claim} {patches} patches; a batch has {MOST_ROWS} at most")
        if patches != rows and rows is not None:
            raise InputError(f"{claim} {patches} patches; got {rows} rows")
        return result

    def item_grids(self, mm_kwargs: dict[str, Any]) -> Sequence[Grid]:
        """The grids of a batch, images' then videos'; raises as `read_request`."""
        return self.read_request(mm_kwargs, planned=True).described.grids

    # --- the manager's protocol

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """ "video" if there are videos, else "image"."""
        return "video" if mm_kwargs.get("video_grid_thw") is not None else "image"

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Patches and output tokens of every item; patches may be missing. Raises as `read_request`."""
        return [self.item_spec(grid) for grid in self.item_grids(mm_kwargs)]

    def item_spec(self, grid: Grid) -> EncoderItemSpec:
        """The patches and output tokens of an item."""
        t, h, w = grid
        return EncoderItemSpec(input_size=t * h * w, output_tokens=t * h * w // self.rows_per_token)

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
        described, patches, _ = self.read_request(mm_kwargs)
        grids, num_images = described.grids, described.num_images
        starts = grids_of.cumulative_lengths([t * h * w for t, h, w in grids]).tolist()
        pixels = self.flat_patches(patches)
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

    def flat_patches(self, patches: Sequence[Tensor]) -> list[Tensor]:
        """(patches, features) of every tensor of a request; one without rows if there is none."""
        flat = [part.flatten(1) if part.dim() > 2 else part for part in patches]
        return flat or [torch.zeros(0, self.patch_features, dtype=torch.float32, device="cpu")]


# --- what was read of requests
#
# Inputs may change between requests without a trace, so the key is made anew of each: the numbers in its
# grids, and what tensors of patches say of themselves but their values, which nobody reads.

# Requests that are kept, and the most items and tensors of patches of one. Choices: a service sees few sizes.
_KEPT = 1024
_MOST_ITEMS = 64

_ONLY_INTEGERS = {int}


class Described:
    """What the inputs of requests say of their items: the same object for all that say the same."""

    __slots__ = ("grids", "missing", "num_images")

    def __init__(self, grids: Sequence[Grid], num_images: int, missing: tuple[str, str] | None) -> None:
        self.grids = tuple(grids)
        """Of the images, then of the videos."""
        self.num_images = num_images
        self.missing = missing
        """The names of patches that were not given, and of their grids; None: all were."""


class Look(NamedTuple):
    """A look at a request's inputs, consistent in itself whatever becomes of them meanwhile."""

    key: Hashable
    """Requests of equal keys are read alike."""
    patches: list[Tensor]
    """As they were given, in the order of their names."""
    inputs: dict[str, Any]
    """The inputs, with the grids that the key has."""


def look(mm_kwargs: dict[str, Any], input_keys: Sequence[tuple[str, str]]) -> Look | None:
    """Makes the key of a request; None: it holds something other than `input_keys`, and has to be read."""
    entries: list[Hashable] = []
    patches: list[Tensor] = []
    inputs: dict[str, Any] = {}
    seen = 0
    for key, grid_key in input_keys:
        seen += (key in mm_kwargs) + (grid_key in mm_kwargs)
        parts, grids = mm_kwargs.get(key), mm_kwargs.get(grid_key)
        if parts is not None:
            inputs[key] = several = list(parts) if isinstance(parts, list | tuple) else [parts]
            entries.append(key)
            for part in several:
                if type(part) is not Tensor or part.is_nested:
                    return None
                entries.append((part.shape, part.dtype, part.device, part.layout))
            patches += several
        if grids is not None:
            if (numbers := _numbers_of(grids)) is None:
                return None
            entries.append((grid_key, numbers))
            inputs[grid_key] = numbers
    if seen != len(mm_kwargs) or not inputs or len(patches) > _MOST_ITEMS:
        return None
    return Look(tuple(entries), patches, inputs)


def _numbers_of(grids: Any) -> tuple[tuple[int, ...], ...] | None:
    """A few grids as Python's numbers; None: they are many, or something else."""
    if type(grids) is Tensor:
        is_plain = grids.dtype in INTEGERS and not (grids.is_nested or grids.is_meta)
        if not is_plain or grids.layout != torch.strided or grids.dim() != 2:
            return None
        return tuple(map(tuple, grids.tolist())) if 0 < grids.numel() <= 3 * _MOST_ITEMS else None
    if type(grids) is not list or not 0 < len(grids) <= _MOST_ITEMS:
        return None
    for row in grids:
        # True and 1.0 are equal to 1, and no integers.
        if type(row) is not tuple or not 0 < len(row) <= 3 or set(map(type, row)) != _ONLY_INTEGERS:
            return None
    return tuple(grids)


class KnownRequests:
    """What was read, by `Look.key`. Once there is too much, all of it is forgotten."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Described] = {}

    def __reduce__(self) -> tuple[type[KnownRequests], tuple[()]]:
        return KnownRequests, ()  # copies, also those for other processes, know of none

    def get(self, key: Hashable) -> Described | None:
        """What was read of requests with this key; None: none was."""
        return self._known.get(key)

    def keep(self, key: Hashable, described: Described) -> None:
        """Remembers what was read. Threads may call this at the same time."""
        if len(self._known) >= _KEPT:
            self._known = {}
        self._known[key] = described
