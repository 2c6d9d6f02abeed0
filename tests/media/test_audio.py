from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fxsplit_encoder.errors import MediaError, MissingExtraError
from fxsplit_encoder.media import AudioSamples, MediaSettings, load_audio, measure_audio, sample_bytes

soundfile = pytest.importorskip("soundfile", reason="the extra `audio`")

LIMITS = MediaSettings()
RATE = 16000


def tones(num_samples: int, channels: int = 1, seed: int = 0) -> Any:
    """(channels, samples)."""
    noise = np.random.default_rng(seed).normal(0, 0.1, (channels, num_samples))
    return (noise + np.sin(np.arange(num_samples) / 20) / 4).astype(np.float32)


def encoded(samples: Any, kind: str = "WAV", subtype: str | None = None, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.T, rate, subtype, format=kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "subtype", "error"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "FLOAT", 0),
        ("WAVEX", "PCM_24", 1e-6),
        ("FLAC", None, 1e-4),
        ("AIFF", None, 1e-4),
        ("OGG", None, None),
        ("MP3", None, None),
    ],
)
def test_every_format_is_as_long_as_its_header_says(
    kind: str, subtype: str | None, error: float | None, tmp_path: Path
) -> None:
    samples = tones(20001, 2)
    data = encoded(samples, kind, subtype)
    path = tmp_path / "audio"
    path.write_bytes(data)
    for media in (data, path, str(path)):
        header = measure_audio(media, LIMITS)
        assert (header.num_samples, header.rate, header.channels) == (20001, RATE, 2)
        loaded = load_audio(media, LIMITS)
        assert (loaded.shape, loaded.dtype) == ((20001,), np.float32)
        if error is None:  # lossy
            assert np.corrcoef(loaded, samples.mean(0))[0, 1] > 0.8
        else:
            np.testing.assert_allclose(loaded, samples.mean(0), atol=error + 1e-7)


@pytest.mark.parametrize("channels", [1, 2])
def test_a_file_of_several_blocks_is_whole(channels: int) -> None:
    samples = tones(3 * (1 << 16) + 5, channels)
    loaded = load_audio(encoded(samples, "WAV", "FLOAT"), LIMITS)
    np.testing.assert_allclose(loaded, samples.mean(0), atol=1e-7)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16"])
def test_arrays_and_tensors_are_taken(dtype: str) -> None:
    floats = tones(100, 2)
    given = (floats * 32768).astype(np.int16) if dtype == "int16" else floats.astype(dtype)
    expected = given.astype(np.float32) / (32768 if dtype == "int16" else 1)
    for samples in (given, torch.from_numpy(given)):
        audio = AudioSamples(samples, 8000)
        assert measure_audio(audio, LIMITS) == measure_audio(AudioSamples(given, 8000), LIMITS)
        np.testing.assert_allclose(load_audio(audio, LIMITS), expected.mean(0), atol=1e-7)
        np.testing.assert_array_equal(load_audio(AudioSamples(samples[0], 8000), LIMITS), expected[0])
        assert list(sample_bytes(audio)) == list(sample_bytes(AudioSamples(given, 8000)))
    assert list(sample_bytes(AudioSamples(given, 8000))) != list(sample_bytes(AudioSamples(given, 16000)))
    assert load_audio(AudioSamples(torch.ones(3, dtype=torch.bfloat16), 8000), LIMITS).tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (7, "expected AudioSamples, bytes or a path; got 7"),
        (np.zeros(5, np.float32), "expected AudioSamples"),
        (AudioSamples([0.0], RATE), "an array or a tensor of floats or int16"),
        (AudioSamples(np.zeros(5, np.int32), RATE), r"got \(5,\) of int32"),
        (AudioSamples(np.zeros((1, 2, 3), np.float32), RATE), r"got \(1, 2, 3\)"),
        (AudioSamples(np.zeros((33, 3), np.float32), RATE), "1 to 32 channels; got 33"),
        (AudioSamples(np.zeros(0, np.float32), RATE), "it has none"),
        (AudioSamples(np.zeros(5, np.float32), 0), "samples a second"),
        (AudioSamples(np.zeros(5, np.float32), 16000.0), "samples a second"),  # type: ignore[arg-type]
        (AudioSamples(np.full(5, np.nan, np.float32), RATE), "finite"),
        (b"", "encoded media"),
        (b"RIFF\x00\x00", "encoded media"),
        ("/no/such/file.wav", "no such file"),
        ("https://example.com/a.wav", "expected a path"),
    ],
)
def test_what_is_no_audio_is_refused(media: object, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        load_audio(media, LIMITS)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_file_that_was_cut_off_is_an_error_or_shorter_in_its_header(kind: str) -> None:
    data = encoded(tones(50000), kind)
    for length in (20, 60, len(data) // 2, len(data) - 100):
        try:
            header = measure_audio(data[:length], LIMITS)
            loaded = load_audio(data[:length], LIMITS)
        except MediaError:
            continue
        assert len(loaded) == header.num_samples


def test_a_header_that_lies_is_an_error() -> None:
    data = bytearray(encoded(tones(50000), "FLAC"))
    # 36 bits of STREAMINFO after "fLaC", the block's header, 10 bytes of sizes and 28 bits of the format.
    data[21] = data[21] & 0xF0
    data[22:26] = (60000).to_bytes(4, "big")
    assert measure_audio(bytes(data), LIMITS).num_samples == 60000
    with pytest.raises(MediaError):
        load_audio(bytes(data), LIMITS)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_decoder_that_finds_another_length_is_an_error(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(soundfile.SoundFile):  # type: ignore[misc]
        def blocks(self, *args: Any, **options: Any) -> Iterator[Any]:
            (whole,) = super().blocks(*args, **options)
            yield np.resize(whole, (len(whole) + more, 1))

    monkeypatch.setattr(soundfile, "SoundFile", Other)
    with pytest.raises(MediaError, match="its header says 100 samples"):
        load_audio(encoded(tones(100)), LIMITS)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaSettings(max_seconds=1.0), "max_seconds"),
        (MediaSettings(max_bytes=30000), "max_bytes"),
        (MediaSettings(max_bytes=70000), "max_bytes"),  # of the file less, of its samples as floats more
    ],
)
def test_limits_hold_before_anything_is_decoded(limits: MediaSettings, message: str) -> None:
    samples = tones(20000)
    for media in (encoded(samples), AudioSamples(samples[0], RATE)):
        with pytest.raises(MediaError, match=message):
            measure_audio(media, limits)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match="the extra 'audio'"):
        measure_audio(encoded(tones(10)), LIMITS)
