"""What the connector's parts hand to each other, and who prepares and encodes media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.messages import shown

Modality = Literal["image", "video", "audio"]
Reduction = Literal["half_frames", "half_resolution"]

PIXEL_TABLE = "pixel_table"
"""Among an item's inputs, (channels, 256): what each value of each channel of its uint8 inputs becomes, whose
rows have the channels first. Whoever encodes the item does that where it encodes."""


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image, video or audio clip of a request: a PIL image, an array, encoded bytes or a path, and the
    processor's arguments for it alone, which change its token count and its key.
    """

    modality: Modality
    media: object
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PreparedItem:
    """One item as the encoder takes it, in host memory.

    ``inputs`` are the tower's keyword arguments, such as ``pixel_values`` (patches, width) and
    ``image_grid_thw`` (1, 3). Its feature has ``num_tokens`` rows. ``digest`` (32 bytes) identifies media,
    processor and options. ``metadata`` travels with the feature: grids, times of a video's frames.
    """

    modality: Modality
    digest: bytes
    inputs: Mapping[str, torch.Tensor]
    num_tokens: int
    metadata: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of ``inputs``."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


class MediaProcessor(Protocol):
    """Turns media into the tower's inputs. Called from several threads at once."""

    def count_tokens(self, item: MediaItem) -> int:
        """Rows of the item's feature, from its dimensions alone: nothing is decoded or hashed."""
        ...

    def digest(self, item: MediaItem) -> bytes:
        """The ``digest`` that the prepared item will have, without decoding it: a cache is asked first."""
        ...

    def prepare(self, item: MediaItem) -> PreparedItem:
        """Decode, check and preprocess one item; raises a ``MediaError`` for what cannot be."""
        ...


class PromptRun(NamedTuple):
    """Neighboring placeholder tokens of an item in an expanded prompt."""

    num_tokens: int
    seconds: float | None = None
    """Of a video's frames: the time that its model's prompts show before them."""


@runtime_checkable
class PromptProcessor(Protocol):
    """A ``MediaProcessor`` that can also tell what prompts have to show of an item."""

    def prompt_runs(self, item: MediaItem) -> Sequence[PromptRun]:
        """The item's placeholder tokens, ``count_tokens`` in all, as its prompt divides them; nothing is
        decoded."""
        ...


@runtime_checkable
class MediaReducer(Protocol):
    """A ``MediaProcessor`` that can also ask less of an item for which memory did not suffice."""

    def reduce(self, item: MediaItem, how: Reduction) -> MediaItem | None:
        """The item with half its frames, or with half of each side; None where it has no more to give."""
        ...


@runtime_checkable
class DeviceEncoder(Protocol):
    """A ``FeatureEncoder`` that tells where its features are made: its worker gives it a stream there."""

    @property
    def device(self) -> torch.device | None:
        """Known once it was started; None: no device that has streams."""


@runtime_checkable
class PrioritizedEncoder(DeviceEncoder, Protocol):
    """A ``DeviceEncoder`` that tells how urgent its work is there."""

    @property
    def stream_priority(self) -> int:
        """Of its worker's stream, as CUDA counts: below 0 it goes before streams of 0."""


@runtime_checkable
class TypedEncoder(Protocol):
    """A ``FeatureEncoder`` that tells the dtype of its rows; else the first that are encoded do."""

    @property
    def dtype(self) -> torch.dtype:
        """Rows of another one are refused."""


@runtime_checkable
class StagingEncoder(Protocol):
    """A ``FeatureEncoder`` part of whose work can be done on other threads."""

    def stage(self, item: PreparedItem) -> PreparedItem:
        """The same item in the form that ``encode`` reads soonest, such as in pinned memory. Called from any
        thread, also before ``start``."""
        ...


@runtime_checkable
class SlicingEncoder(Protocol):
    """A ``FeatureEncoder`` that can encode parts of an item apart, such as the frames of a video."""

    def slices(self, item: PreparedItem, most_cost: float) -> Sequence[PreparedItem]:
        """Items whose features, one after the other, are the item's: each of no more than that cost, as far
        as it can be cut. The item alone: it is not."""
        ...


class FeatureEncoder(Protocol):
    """Encodes prepared items on one device.

    Its methods are called from one thread, the one that called ``start``; ``predict_cost`` and ``row_bytes``
    from any, also before ``start``.
    """

    def start(self) -> None:
        """Make ready to encode: load, compile, capture."""
        ...

    def predict_cost(self, item: PreparedItem) -> float:
        """What encoding the item alone costs, in any unit that adds up."""
        ...

    def row_bytes(self, modality: Modality) -> int | None:
        """Bytes of one row of a feature, for which memory is reserved; None: it does not encode these."""
        ...

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """Features (rows, width), one per item and in order, owned by the caller.

        Raises:
            EncoderLostError: this encoder will not encode again; another has to be started. Any other error
                means that some of these items cannot be encoded.
        """
        ...

    def close(self) -> None:
        """Give back what the encoder holds; idempotent."""
        ...


class ProcessorByModality:
    """Hands every item to the processor of its modality.

    Args:
        processors: by modality; one may have several.
    """

    def __init__(self, processors: Mapping[Modality, MediaProcessor]) -> None:
        self._processors = dict(processors)

    def count_tokens(self, item: MediaItem) -> int:
        """See `MediaProcessor`.

        Raises:
            MediaError: there is no processor for its modality, or its processor refuses it.
        """
        return self._of(item).count_tokens(item)

    def digest(self, item: MediaItem) -> bytes:
        """See `MediaProcessor`."""
        return self._of(item).digest(item)

    def prompt_runs(self, item: MediaItem) -> Sequence[PromptRun]:
        """See `PromptProcessor`; one run of all tokens where the item's processor does not tell."""
        processor = self._of(item)
        if isinstance(processor, PromptProcessor):
            return processor.prompt_runs(item)
        return [PromptRun(processor.count_tokens(item))]

    def prepare(self, item: MediaItem) -> PreparedItem:
        """See `MediaProcessor`."""
        return self._of(item).prepare(item)

    def reduce(self, item: MediaItem, how: Reduction) -> MediaItem | None:
        """See `MediaReducer`; None where the item's processor cannot reduce."""
        processor = self._of(item)
        return processor.reduce(item, how) if isinstance(processor, MediaReducer) else None

    def _of(self, item: MediaItem) -> MediaProcessor:
        processor = self._processors.get(item.modality)
        if processor is None:
            expected = " or ".join(self._processors)
            raise MediaError(f"modality: expected {expected}; got {shown(item.modality)}")
        return processor
