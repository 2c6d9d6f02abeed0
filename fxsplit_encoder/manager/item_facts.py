"""What plans need to know of items beside their sizes, and what is assumed of a tower that does not tell."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG, SupportsEncoderCudaGraph


class ItemFacts:
    """What a tower tells of the items of a batch, by methods that it may lack.

    Which it has is found out once: a module that is asked for what it has not looks everywhere first.
    """

    def __init__(self, tower: SupportsEncoderCudaGraph) -> None:
        self._tower = tower
        self._modalities = getattr(tower, "item_modalities", None)
        self._segments = getattr(tower, "item_segments", None)
        self._frames = getattr(tower, "item_frames", None)

    def modalities(self, mm_kwargs: dict[str, Any], num_items: int) -> list[str]:
        """ "image" or "video" for every item; the batch's own modality where the tower does not tell."""
        if self._modalities is not None:
            return self._check(self._modalities(mm_kwargs), "item_modalities", num_items)
        return [self._tower.get_input_modality(mm_kwargs)] * num_items if num_items else []

    def segments(self, mm_kwargs: dict[str, Any], num_items: int) -> list[int]:
        """Attention segments of every item: what the tower tells, else its video's frames, else one."""
        if self._segments is not None:
            return self._check(self._segments(mm_kwargs), "item_segments", num_items)
        grids = mm_kwargs.get("video_grid_thw")
        if grids is None or len(grids) != num_items:
            return [1] * num_items
        return [int(grid[0]) for grid in grids]

    def frames(
        self, mm_kwargs: dict[str, Any], modalities: Sequence[str], segments: Sequence[int]
    ) -> list[int]:
        """Video frames of every item, 0 for an image; a frame is a segment where the tower does not tell."""
        if "video" not in modalities:
            return [0] * len(modalities)
        told = segments
        if self._frames is not None:
            told = self._check(self._frames(mm_kwargs), "item_frames", len(modalities))
        return [count if modality == "video" else 0 for count, modality in zip(told, modalities, strict=True)]

    def _check(self, told: list[Any], method: str, num_items: int) -> list[Any]:
        if len(told) != num_items:
            raise InputError(
                f"{type(self._tower).__name__}.{method}: expected one entry an item, {num_items}; got "
                f"{len(told)}"
            )
        return told


def item_axis_keys(
    tower: SupportsEncoderCudaGraph, mm_kwargs: dict[str, Any], num_items: int, num_axes: int
) -> list[tuple[Hashable, ...]]:
    """The axis keys of every item, which a tower with capture axes tells of any selection of items."""
    return [select_items(tower, mm_kwargs, [index], num_axes)[1] for index in range(num_items)]


def select_items(
    tower: SupportsEncoderCudaGraph, mm_kwargs: dict[str, Any], indices: Sequence[int], num_axes: int
) -> tuple[dict[str, Any], tuple[Hashable, ...]]:
    """The inputs of some items, and what a tower with so many capture axes says of them. The keys are no
    input: nothing that takes the inputs sees them.

    Raises:
        InputError: it says nothing, or not one key an axis.
    """
    selected = tower.select_encoder_cudagraph_items(mm_kwargs, list(indices))
    keys = selected.get(ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG)
    if keys is not None:
        selected = {k: v for k, v in selected.items() if k != ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG}
    return selected, _checked(keys, num_axes) if num_axes else ()


def _checked(keys: Any, num_axes: int) -> tuple[Hashable, ...]:
    if keys is None:
        raise InputError(
            f"select_encoder_cudagraph_items gave no {ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG!r}; a tower with "
            "capture_axes must give one key an axis there"
        )
    if not isinstance(keys, tuple | list) or len(keys) != num_axes:
        raise InputError(
            f"select_encoder_cudagraph_items gave {keys!r} as {ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG!r}; "
            f"expected a tuple of {num_axes}, one key for each of the tower's capture_axes"
        )
    return tuple(keys)
