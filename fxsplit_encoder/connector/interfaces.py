"""Items, and the interfaces of processors and encoders of media."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch

from fxsplit_encoder.errors import InputError, MediaError
from fxsplit_encoder.messages import name_of, shown

Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
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
    """One item as the encoder takes it, in host memory; TypeError: an input is no tensor.

    ``inputs`` are the tower's keyword arguments, such as ``pixel_values`` (patches, width) and
    ``image_grid_thw`` (1, 3). Its feature has ``num_tokens`` rows. ``digest`` (32 bytes) identifies media,
    processor and options. ``metadata`` travels with the feature: grids, times of a video's frames.
    """

    modality: Modality
    digest: bytes
    inputs: Mapping[str, torch.Tensor]
    num_tokens: int
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in self.inputs.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"inputs.{name_of(name)}: expected a tensor; got {shown(tensor)}")

    @property
    def num_bytes(self) -> int:
        """Bytes of ``inputs``."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


class PromptRun(NamedTuple):
    """Neighboring placeholder tokens of an item in an expanded prompt."""

    num_tokens: int
    seconds: float | None = None
    """Of a video's frames: the time that its model's prompts show before them."""


class MediaProcessor(ABC):
    """Turns media into the tower's inputs. Called from several threads at once."""

    @abstractmethod
    def count_tokens(self, item: MediaItem) -> int:
        """Rows of the item's feature, from its dimensions alone: nothing is decoded or hashed."""

    @abstractmethod
    def digest(self, item: MediaItem) -> bytes:
        """The ``digest`` that the prepared item will have, without decoding it: a cache is asked first."""

    @abstractmethod
    def prepare(self, item: MediaItem) -> PreparedItem:
        """Decode, check and preprocess one item; raises a ``MediaError`` for what cannot be."""

    def prompt_runs(self, item: MediaItem) -> Sequence[PromptRun]:
        """The item's ``count_tokens`` as its prompt divides them, undecoded; InputError: it does not tell."""
        raise InputError(f"{type(self).__name__} does not tell what prompts show of media")

    def reduce(self, item: MediaItem, how: Reduction) -> MediaItem | None:
        """The item with half its frames, or with half of each side; None where it has no more to give."""
        return None


class FeatureEncoder(ABC):
    """Encodes prepared items on one device.

    Its methods are called from one thread, the one that called ``start``; ``predict_cost``, ``row_bytes`` and
    ``stage`` from any, also before ``start``.
    """

    device: torch.device | str | None = None
    """Where features are made, known once it was started: its worker gives it a stream there. None: no device
    that has streams."""
    stream_priority: int = 0
    """Of its worker's stream, as CUDA counts: below 0 it goes before streams of 0."""
    dtype: torch.dtype | None = None
    """Of its rows: those of another one are refused. None: that of the first that are encoded."""

    def start(self) -> None:  # noqa: B027 - many have nothing to do
        """Make ready to encode: load, compile, capture."""

    def predict_cost(self, item: PreparedItem) -> float:
        """Cost of encoding the item alone, in any unit that adds up."""
        return float(item.num_tokens)

    @abstractmethod
    def row_bytes(self, modality: Modality) -> int | None:
        """Bytes of one row of a feature, for which memory is reserved; None: it does not encode these."""

    def stage(self, item: PreparedItem) -> PreparedItem:
        """The same item in the form that ``encode`` reads soonest, such as in pinned memory."""
        return item

    def slices(self, item: PreparedItem, most_cost: float) -> Sequence[PreparedItem]:
        """Cut an item to some of that cost at most, whose features, one after the other, are the item's."""
        return [item]

    @abstractmethod
    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """Features (rows, width), one per item and in order, owned by the caller.

        Raises:
            EncoderLostError: this encoder will not encode again; another has to be started, as after
                `torch.AcceleratorError`. Any other error means that some of these items cannot be encoded.
        """

    def close(self) -> None:  # noqa: B027 - many hold nothing
        """Give back what the encoder holds; idempotent."""


class ProcessorByModality(MediaProcessor):
    """Hands every item to the processor of its modality; every method raises MediaError where it has none."""

    def __init__(self, processors: Mapping[Modality, MediaProcessor]) -> None:
        self._processors = dict(processors)

    def count_tokens(self, item: MediaItem) -> int:
        """See `MediaProcessor`."""
        return self._of(item).count_tokens(item)

    def digest(self, item: MediaItem) -> bytes:
        """See `MediaProcessor`."""
        return self._of(item).digest(item)

    def prompt_runs(self, item: MediaItem) -> Sequence[PromptRun]:
        """See `MediaProcessor`."""
        return self._of(item).prompt_runs(item)

    def prepare(self, item: MediaItem) -> PreparedItem:
        """See `MediaProcessor`."""
        return self._of(item).prepare(item)

    def reduce(self, item: MediaItem, how: Reduction) -> MediaItem | None:
        """See `MediaProcessor`."""
        return self._of(item).reduce(item, how)

    def _of(self, item: MediaItem) -> MediaProcessor:
        processor = self._processors.get(item.modality)
        if processor is None:
            expected = " or ".join(self._processors)
            raise MediaError(f"modality: expected {expected}; got {shown(item.modality)}")
        return processor
