"""The items of a request as planning sees them, and what is assumed of a tower that does not tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning import Item, MissReason
from fxsplit_encoder.protocol import ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from fxsplit_encoder.protocol import EncoderCudaGraphConfig, EncoderItemSpec, SupportsEncoderCudaGraph


class ItemFacts(NamedTuple):
    """What plans need to know of a request's items beside their sizes: the fields of `Item`, each for all."""

    frames: list[int]
    segments: list[int]
    axis_keys: list[tuple[Hashable, ...]]
    refusals: list[MissReason | None]

    @classmethod
    def read(
        cls,
        tower: SupportsEncoderCudaGraph,
        mm_kwargs: dict[str, Any],
        num_items: int,
        model_config: EncoderCudaGraphConfig,
    ) -> Self:
        """What the tower tells of the items, or is assumed of them.

        Raises:
            InputError: the tower does not tell something of every item, or of its capture axes.
        """
        modalities = item_modalities(tower, mm_kwargs, num_items)
        segments = item_segments(tower, mm_kwargs, num_items)
        num_axes = len(model_config.capture_axes)
        return cls(
            video_frames(tower, mm_kwargs, modalities, segments),
            segments,
            item_axis_keys(tower, mm_kwargs, num_items, num_axes) if num_axes else [()] * num_items,
            _refusals(modalities, model_config.modalities),
        )

    def items(self, specs: Sequence[EncoderItemSpec]) -> list[Item]:
        """The items, of these sizes."""
        return list(map(Item, specs, *self))


def _refusals(modalities: Sequence[str], served: Sequence[str]) -> list[MissReason | None]:
    """Why every item is never replayed, None for one that may be."""
    if set(modalities).issubset(served):
        return [None] * len(modalities)
    return [None if modality in served else MissReason.UNSUPPORTED_INPUT for modality in modalities]


def item_modalities(tower: SupportsEncoderCudaGraph, mm_kwargs: dict[str, Any], num_items: int) -> list[str]:
    """ "image" or "video" for every item; the batch's own modality where the tower does not tell."""
    told = _told(tower, "item_modalities", mm_kwargs, num_items)
    if told is not None:
        return told
    return [tower.get_input_modality(mm_kwargs)] * num_items if num_items else []


def item_segments(tower: SupportsEncoderCudaGraph, mm_kwargs: dict[str, Any], num_items: int) -> list[int]:
    """Attention segments of every item, of a video its frames; one each where the tower does not tell."""
    told = _told(tower, "item_segments", mm_kwargs, num_items)
    return told if told is not None else [1] * num_items


def video_frames(
    tower: SupportsEncoderCudaGraph,
    mm_kwargs: dict[str, Any],
    modalities: Sequence[str],
    segments: Sequence[int],
) -> list[int]:
    """Video frames of every item, 0 for an image; a frame is a segment where the tower does not tell."""
    if "video" not in modalities:
        return [0] * len(modalities)
    told = _told(tower, "item_frames", mm_kwargs, len(modalities))
    frames = told if told is not None else segments
    return [count if modality == "video" else 0 for count, modality in zip(frames, modalities, strict=True)]


def _told(
    tower: SupportsEncoderCudaGraph, name: str, mm_kwargs: dict[str, Any], num_items: int
) -> list[Any] | None:
    """What an optional method of the tower says of every item; None: the tower does not have it."""
    method = getattr(tower, name, None)
    if method is None:
        return None
    told: list[Any] = method(mm_kwargs)
    if len(told) != num_items:
        raise InputError(
            f"{type(tower).__name__}.{name}: expected one entry an item, {num_items}; got {len(told)}"
        )
    return told


def item_axis_keys(
    tower: SupportsEncoderCudaGraph, mm_kwargs: dict[str, Any], num_items: int, num_axes: int
) -> list[tuple[Hashable, ...]]:
    """The axis keys of every item, which a tower with capture axes tells of any selection of items."""
    return [
        axis_keys(tower.select_encoder_cudagraph_items(mm_kwargs, [index]), num_axes)
        for index in range(num_items)
    ]


def axis_keys(mm_kwargs: Mapping[str, Any], num_axes: int) -> tuple[Hashable, ...]:
    """What a tower with so many capture axes says of a selection of items.

    Raises:
        InputError: it says nothing, or not one key an axis.
    """
    keys = mm_kwargs.get(ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG)
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
