"""Audio: how long it is, from its header, and its samples, the channels of a file as one.

Files are read by libsndfile through soundfile, which tells lengths without decoding and gives floats of every
format; the standard library's `wave` knows PCM of WAV files alone, without their extended headers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media.sources import (
    ARRAYS,
    HeaderReader,
    MediaSettings,
    attempt,
    imported,
    is_encoded,
    name_of,
)
from fxsplit_encoder.messages import shown

FORMATS = ("AIFF", "FLAC", "MP3", "OGG", "RF64", "W64", "WAV", "WAVEX")
"""Those that are read, under libsndfile's names."""

_DTYPES = ("float16", "float32", "float64", "bfloat16", "int16")
_MOST_CHANNELS = 32
_AT_ONCE = 1 << 16
_INT16 = 1 << 15


@dataclass(frozen=True, eq=False)
class AudioSamples:
    """Decoded audio: samples and their rate."""

    samples: Any
    """(samples,) or (channels, samples), an array or a tensor: floats from -1 to 1, or int16."""

    rate: int
    """Samples a second."""


@dataclass(frozen=True)
class AudioHeader:
    """Length of audio, read before anything is decoded."""

    num_samples: int
    """Of each channel."""
    rate: int
    """Samples a second."""
    channels: int


def measure_audio(media: object, limits: MediaSettings) -> AudioHeader:
    """Reads the length of audio from its header or its shape, without decoding.

    Args:
        media: `AudioSamples`; encoded bytes; or a path.
        limits: of seconds, and of bytes, encoded and as one channel of floats.

    Raises:
        MediaError: it is no audio, is empty, or is beyond a limit.
        MissingExtraError: a file has to be read, and soundfile is not installed.
    """
    name = name_of(media) if is_encoded(media) else "audio"
    if is_encoded(media):
        with _reading(media, limits) as file:
            header = AudioHeader(file.frames, file.samplerate, file.channels)
    elif not isinstance(media, AudioSamples):
        raise MediaError(f"audio: expected AudioSamples, bytes or a path; got {shown(media)}")
    else:
        if type(media.rate) is not int or media.rate < 1:
            raise MediaError(f"audio: expected samples a second, an integer above 0; got {shown(media.rate)}")
        shape = _array(media).shape
        limits.check("max_bytes", media.samples.nbytes, name)
        header = AudioHeader(shape[-1], media.rate, shape[0] if len(shape) == 2 else 1)
    if not 1 <= header.channels <= _MOST_CHANNELS:
        raise MediaError(f"{name}: expected 1 to {_MOST_CHANNELS} channels; got {header.channels}")
    if header.num_samples < 1:
        raise MediaError(f"{name}: expected samples; it has none")
    limits.check("max_seconds", header.num_samples / header.rate, name)
    limits.check("max_bytes", header.num_samples * np.dtype(np.float32).itemsize, name)
    return header


def load_audio(media: object, limits: MediaSettings) -> NDArray[np.float32]:
    """The samples of audio, as `measure_audio` takes it, from -1 to 1, as one channel, the mean of several;
    MediaError: it cannot be decoded, is not as long as its header says, or is beyond a limit.
    """
    num_samples = measure_audio(media, limits).num_samples
    if isinstance(media, AudioSamples):
        array = _array(media)
        samples = array.astype(np.float32)
        if array.dtype == np.int16:
            samples /= _INT16
        samples = samples.mean(axis=0, dtype=np.float32) if samples.ndim == 2 else samples
    else:
        with _reading(media, limits) as file, attempt(name_of(media), "audio"):
            # The mean of the channels, a block at a time: all channels together may not fit.
            blocks = file.blocks(_AT_ONCE, dtype="float32", always_2d=True)
            samples = np.concatenate([block.mean(axis=1) for block in blocks])
            if len(samples) != num_samples:
                raise MediaError(f"its header says {num_samples} samples, and there are {len(samples)}")
    if not np.isfinite(samples).all():
        raise MediaError("audio: expected finite samples; some are infinite or no numbers")
    return samples


def sample_bytes(audio: AudioSamples) -> Iterator[bytes]:
    """Returns the bytes of decoded audio that its digest covers."""
    samples = np.ascontiguousarray(_array(audio))
    yield f"audio {audio.rate} {samples.shape} {samples.dtype}".encode()
    yield samples.tobytes()


@contextmanager
def _reading(media: object, limits: MediaSettings) -> Iterator[Any]:
    soundfile, name = imported("soundfile", "libsndfile", "decoding audio files", "audio"), name_of(media)
    with closing(HeaderReader(media, limits)) as reader:
        reader.unlimit()
        with attempt(name, "audio"):
            file = soundfile.SoundFile(reader)
        with file:
            if file.format not in FORMATS:
                raise MediaError(f"{name}: expected one of {', '.join(FORMATS)}; got {shown(file.format)}")
            yield file


def _array(audio: AudioSamples) -> NDArray[Any]:
    samples = audio.samples
    is_array = isinstance(samples, ARRAYS)
    dtype = str(samples.dtype).removeprefix("torch.") if is_array else ""
    if dtype not in _DTYPES or samples.ndim not in (1, 2):
        got = f"{tuple(samples.shape)} of {dtype}" if is_array else shown(samples)
        raise MediaError(
            "audio: expected (samples,) or (channels, samples), an array or a tensor of floats or int16; "
            f"got {got}"
        )
    if isinstance(samples, torch.Tensor):
        samples = samples.detach().cpu()
        samples = (samples.float() if dtype == "bfloat16" else samples).numpy()
    array: NDArray[Any] = samples
    return array
