"""Whisper's encoder: audio in pieces of 30 seconds, each 1500 rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxsplit_encoder.models.family import Family, hugging_face, no_images
from fxsplit_encoder.towers import DenseTowerSpec

_INPUT = "input_features"
_FRAMES_PER_ROW = 2
"""The second convolution takes every other frame."""


def whisper_spec(encoder: Any, side: int | None = None) -> DenseTowerSpec:
    """Declares a `transformers` WhisperEncoder for `wrap`; its pieces have one size."""
    config = encoder.config
    rows = config.max_source_positions
    shape = (config.num_mel_bins, _FRAMES_PER_ROW * rows)
    return DenseTowerSpec(shape, rows, config.d_model, input_name=_INPUT, modality="audio")


def whisper_extractor(processor: Mapping[str, Any]) -> Any:
    """Makes the extractor of mel frames from samples."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(**processor)


FAMILIES = {
    "whisper": Family(
        hugging_face("whisper", "WhisperEncoder"),
        no_images,
        prefixes=("model.encoder.", "encoder.", ""),
        spec=whisper_spec,
        extractor=whisper_extractor,
    )
}
