"""An encoder and a processor to test an engine with: no model, no GPU, no media, every fault on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxsplit_encoder.connector.interfaces import (
    FeatureEncoder,
    MediaItem,
    MediaProcessor,
    Modality,
    PreparedItem,
    PromptRun,
    Reduction,
)
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.messages import shown


class FakeProcessor(MediaProcessor):
    """Takes any media that is a string, of as many rows as its option `tokens` says; `on_prepare`, called
    with every item that is preprocessed, may wait or raise.
    """

    def __init__(self, on_prepare: Callable[[MediaItem], None] = lambda item: None) -> None:
        self._on_prepare = on_prepare

    def count_tokens(self, item: MediaItem) -> int:
        """Read its option; 4 without one."""
        tokens = item.options.get("tokens", 4)
        if not isinstance(tokens, int):
            raise MediaError(f"tokens: expected an integer; got {shown(tokens)}")
        return tokens

    def digest(self, item: MediaItem) -> bytes:
        """Of the string and the number of tokens."""
        if not isinstance(item.media, str):
            raise MediaError(f"media: expected a string; got {shown(item.media)}")
        return hashlib.sha256(f"{item.modality} {self.count_tokens(item)} {item.media}".encode()).digest()

    def prompt_runs(self, item: MediaItem) -> list[PromptRun]:
        """One run; of a video one a second of no more than two tokens."""
        tokens = self.count_tokens(item)
        if item.modality != "video":
            return [PromptRun(tokens)]
        starts = range(0, tokens, 2)
        return [PromptRun(min(2, tokens - start), float(index)) for index, start in enumerate(starts)]

    def prepare(self, item: MediaItem) -> PreparedItem:
        """An item whose only input is a vector of zeros; its media travels as metadata."""
        self._on_prepare(item)
        inputs = {"pixel_values": torch.zeros(self.count_tokens(item), dtype=torch.float32, device="cpu")}
        digest, tokens = self.digest(item), self.count_tokens(item)
        return PreparedItem(item.modality, digest, inputs, tokens, {"media": item.media})

    def reduce(self, item: MediaItem, how: Reduction) -> MediaItem | None:
        """The item with half the tokens."""
        tokens = self.count_tokens(item) // 2
        return MediaItem(item.modality, item.media, {**item.options, "tokens": tokens}) if tokens else None


class FakeEncoder(FeatureEncoder):
    """Makes rows of items' digests, as `fake_rows` does; `on_encode`, called with every batch before, may
    wait or raise.
    """

    def __init__(
        self,
        width: int = 8,
        on_encode: Callable[[Sequence[PreparedItem]], None] = lambda items: None,
        modalities: Sequence[Modality] = ("image", "video", "audio"),
    ) -> None:
        self._width = width
        self.dtype: torch.dtype = torch.float32
        self._on_encode = on_encode
        self._modalities = modalities

    def row_bytes(self, modality: Modality) -> int | None:
        """Of `width` columns."""
        return self._width * self.dtype.itemsize if modality in self._modalities else None

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        """The rows of each item."""
        self._on_encode(items)
        return [fake_rows(item.digest, item.num_tokens, self._width, self.dtype) for item in items]


def fake_rows(digest: bytes, num_tokens: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a `FakeEncoder` for an item: the first bytes of its digest, plus the number of the row."""
    first = [digest[column % len(digest)] for column in range(width)]
    columns = torch.tensor(first, dtype=dtype, device="cpu")
    return columns + torch.arange(num_tokens, dtype=dtype, device="cpu")[:, None]
