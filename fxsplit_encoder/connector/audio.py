"""From audio to the inputs of a tower that encodes pieces of one length, such as Whisper's of 30 seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.keys import HashName, Part, digest_of, item_digest
from fxsplit_encoder.connector.preprocess import check_options
from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media import (
    AudioSamples,
    MediaLimits,
    load_audio,
    measure_audio,
    read_source,
    sample_bytes,
)
from fxsplit_encoder.media.sources import Encoded, attempt
from fxsplit_encoder.messages import shown


class FeatureExtractor(Protocol):
    """A model's own, such as `transformers.WhisperFeatureExtractor`. Called from several threads at once."""

    sampling_rate: int
    """Samples a second."""
    n_samples: int
    """Of one piece."""

    def __call__(self, raw_speech: Sequence[Any], **options: Any) -> Mapping[str, Any]:
        """The input of the tower, under its name: (pieces, mel bins, frames), each piece padded."""
        ...


class AudioProcessor:
    """Audio to the inputs of one tower: pieces of equal length, the last one padded with silence.

    A piece has the same number of rows whether it is full or not, as its model is used to; the metadata say
    how many of an item's rows have sound.

    Args:
        tower: what `wrap` returns; its weights are never read, so it may lie on the meta device.
        extractor: the model's own.
        fingerprint: of the extractor: equal ones make equal inputs of equal samples.
        limits: for every item.
        hash_name: of the function for digests.
    """

    def __init__(
        self,
        tower: Any,
        extractor: FeatureExtractor,
        fingerprint: bytes,
        limits: MediaLimits | None = None,
        hash_name: HashName = "blake3",
    ) -> None:
        digest_of([], hash_name)  # a missing package is found here
        self.tower = tower
        self.extractor = extractor
        self.fingerprint = fingerprint
        self.limits = limits or MediaLimits()
        self.hash_name: HashName = hash_name

    def count_tokens(self, item: MediaItem) -> int:
        """Rows of the item's feature, from its header or its shape; nothing is decoded or hashed.

        Raises:
            MediaError: it is no audio of the model's rate, or is beyond a limit.
        """
        return self._count(self._num_samples(item))

    def digest(self, item: MediaItem) -> bytes:
        """What identifies the prepared item, from its bytes, which are not decoded.

        Raises:
            MediaError: as `count_tokens`.
        """
        self._num_samples(item)
        return self._digest(item, read_source(item.media, self.limits))

    def prepare(self, item: MediaItem) -> PreparedItem:
        """Read, hash, decode and preprocess one item. Its inputs are on the CPU.

        Raises:
            MediaError: it cannot be decoded, or is beyond a limit.
        """
        item = replace(item, media=read_source(item.media, self.limits))
        num_samples = self._num_samples(item)
        count, digest = self._count(num_samples), self._digest(item, item.media)
        samples, piece = load_audio(item.media, self.limits), self.extractor.n_samples
        pieces = [samples[start : start + piece] for start in range(0, num_samples, piece)]
        with attempt("audio", "what the model takes"), torch.device("cpu"):
            made = self.extractor(pieces, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
            inputs = {self.tower.input_name: made[self.tower.input_name], **self._sizes(len(pieces))}
        metadata = {
            "hidden_size": self.tower.out_hidden_size,
            "seconds": num_samples / self.extractor.sampling_rate,
            "pieces": len(pieces),
            "rows_with_sound": -(-num_samples * count // (len(pieces) * piece)),
        }
        return PreparedItem("audio", digest, inputs, count, metadata)

    def _num_samples(self, item: MediaItem) -> int:
        if item.modality != "audio":
            raise MediaError(f"modality: expected audio, which the model takes; got {shown(item.modality)}")
        check_options(item.options, {})
        header, expected = measure_audio(item.media, self.limits), self.extractor.sampling_rate
        if header.rate != expected:
            raise MediaError(
                f"audio: expected {expected} samples a second, the model's; got {header.rate}; resample it"
            )
        return header.num_samples

    def _count(self, num_samples: int) -> int:
        """Rows by the tower's own arithmetic."""
        pieces = -(-num_samples // self.extractor.n_samples)
        specs = self.tower.get_encoder_cudagraph_item_specs(self._sizes(pieces))
        count: int = sum(spec.output_tokens for spec in specs)
        self.limits.check("max_tokens", count, "its feature")
        return count

    def _sizes(self, pieces: int) -> dict[str, torch.Tensor]:
        return {self.tower.count_keys[0]: torch.tensor([pieces], device="cpu")}

    def _digest(self, item: MediaItem, media: object) -> bytes:
        parts: list[Part] = []
        if isinstance(media, AudioSamples):
            parts += sample_bytes(media)
        elif isinstance(media, Encoded):
            parts.append(media)
        fingerprint = digest_of([b"audio", self.fingerprint], self.hash_name)
        return item_digest(digest_of(parts, self.hash_name), fingerprint, item.options, self.hash_name)
