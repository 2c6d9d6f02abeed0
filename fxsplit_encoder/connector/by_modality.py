"""A processor for each modality, for a connector whose workers encode with several towers."""

from __future__ import annotations

from collections.abc import Mapping

from fxsplit_encoder.connector.seams import (
    MediaItem,
    MediaProcessor,
    MediaReducer,
    Modality,
    PreparedItem,
    Reduction,
)
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.messages import shown


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
