from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fxsplit_encoder.errors import MediaError, MissingExtraError
from fxsplit_encoder.media import MediaSettings, VideoFrames, VideoHeader, measure_image, open_video, sources
from fxsplit_encoder.media.sources import HeaderReader
from fxsplit_encoder.media.videos import animation_seconds

from .test_images import noise

LIMITS = MediaSettings()
FRAMES = [noise(40, 24, seed) for seed in range(5)]
KINDS = ("WEBP", "PNG", "GIF")


def animated(kind: str, duration: int | list[int] = 80, frames: list[Image.Image] = FRAMES) -> bytes:
    buffer = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(
        buffer, kind, save_all=True, append_images=frames[1:], duration=duration, loop=0, **options
    )
    return buffer.getvalue()


def pixels_of(media: object, indices: list[int]) -> np.ndarray:
    with open_video(media, LIMITS) as video:
        return np.stack([np.asarray(frame) for frame in video.select(indices, LIMITS)])


def header_of(media: object, limits: MediaSettings = LIMITS) -> VideoHeader:
    with open_video(media, limits) as video:
        return video.header


EXPECTED = np.stack([np.asarray(frame) for frame in FRAMES])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duration", [80, [40, 40, 100, 120, 100]])
def test_an_animated_image_is_a_video(kind: str, duration: int | list[int], tmp_path: Path) -> None:
    data = animated(kind, duration)
    path = tmp_path / "video"
    path.write_bytes(data)
    for media in (data, path):
        with open_video(media, LIMITS) as video:
            assert video.header == VideoHeader(5, 40, 24, pytest.approx(12.5))
            frames = video.select([0, 2, 2, 4], LIMITS)
            assert (len(frames), frames.size) == (4, (40, 24))
            got = np.stack([np.asarray(frame) for frame in frames])
        if kind != "GIF":  # which has a palette
            np.testing.assert_array_equal(got, EXPECTED[[0, 2, 2, 4]])


def test_an_opened_animation_stays_open_and_has_no_known_rate() -> None:
    opened = Image.open(io.BytesIO(animated("WEBP")))
    np.testing.assert_array_equal(pixels_of(opened, [1, 3]), EXPECTED[[1, 3]])
    np.testing.assert_array_equal(pixels_of(opened, [0]), EXPECTED[[0]])
    assert header_of(opened).fps is None


def test_a_still_image_is_a_video_of_one_frame() -> None:
    buffer = io.BytesIO()
    FRAMES[0].save(buffer, "PNG")
    for media in (buffer.getvalue(), FRAMES[0]):
        np.testing.assert_array_equal(pixels_of(media, [0]), EXPECTED[:1])


@pytest.mark.parametrize(
    "media",
    [
        FRAMES,
        tuple(FRAMES),
        EXPECTED,
        EXPECTED.transpose(0, 3, 1, 2),
        torch.from_numpy(EXPECTED.copy()),
        VideoFrames(FRAMES, fps=4.0),
        VideoFrames(EXPECTED),
        [np.asarray(frame) for frame in FRAMES],
    ],
)
def test_frames_may_be_decoded_already(media: object) -> None:
    np.testing.assert_array_equal(pixels_of(media, [0, 3]), EXPECTED[[0, 3]])
    assert header_of(media).fps == (4.0 if isinstance(media, VideoFrames) and media.fps else None)


def test_frames_are_shrunk_as_they_are_decoded() -> None:
    with open_video(FRAMES, LIMITS) as video:
        frames = video.select([0, 1], LIMITS, scale=0.5)
        assert frames.size == (20, 12)
        assert {frame.size for frame in frames} == {(20, 12)}


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([], "expected VideoFrames, bytes, a path or a list of frames; got"),
        (np.zeros((0, 4, 4, 3), np.uint8), "expected .frames, height, width, 3."),
        (np.zeros((4, 4, 3), np.uint8), "expected .frames, height, width, 3."),
        ([noise(4, 4), noise(4, 8)], r"expected frames of one size; got \[\(4, 4\), \(4, 8\)\]"),
        (VideoFrames(FRAMES, fps=0), "expected frames per second above 0"),
        (VideoFrames(FRAMES, fps=float("nan")), "expected frames per second above 0"),
        (7, "expected VideoFrames"),
        (animated("WEBP")[:400], "cannot be read as"),
        (b"GIF89a", "cannot be read as"),
    ],
)
def test_what_is_no_video_is_named(media: object, message: str) -> None:
    with pytest.raises(MediaError, match=message), open_video(media, LIMITS) as video:
        list(video.select([0], LIMITS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_animation_is_an_error_when_it_is_decoded_at_the_latest(kind: str) -> None:
    data = animated(kind)
    for size in range(100, len(data) - 100, len(data) // 7):
        try:
            with open_video(data[:size], LIMITS) as video:
                list(video.select(range(video.header.num_frames), LIMITS))
        except MediaError:
            continue
        assert video.header.num_frames < 5


def test_limits_hold_before_anything_is_decoded() -> None:
    data = animated("WEBP", 1000)
    for limits, message in (
        (MediaSettings(max_pixels=900), "960 pixels; expected at most 900"),
        (MediaSettings(max_seconds=4), "5 seconds; expected at most 4"),
        (MediaSettings(max_bytes=100), "the limit max_bytes"),
    ):
        with pytest.raises(MediaError, match=message):
            header_of(data, limits)
    few = MediaSettings(max_frames=3)
    with open_video(data, LIMITS) as video:
        with pytest.raises(MediaError, match="4 frames; expected at most 3, the limit max_frames"):
            video.select([3], few)
        assert len(video.select([0, 2], few)) == 2
    with open_video(FRAMES, LIMITS) as video:
        assert len(video.select([3], few)) == 1
    with pytest.raises(MediaError, match="the limit max_frames"):
        header_of(Image.open(io.BytesIO(data)), few)


def test_video_files_need_torchcodec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(MissingExtraError, match="those of the extra 'video'"):
        header_of(b"\x00\x00\x00\x20ftypisom" + bytes(64))


@pytest.mark.parametrize(
    "start", [b"", b"RIFF\x00\x00\x00\x00WEBP", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"ftyp"]
)
@pytest.mark.parametrize("rest", [b"", b"\xff" * 40, b"\x00" * 40, bytes(range(256))])
def test_no_contents_break_the_reading_of_durations(start: bytes, rest: bytes) -> None:
    seconds = animation_seconds(HeaderReader(start + rest, LIMITS))
    assert seconds is None if start in (b"", b"ftyp") else seconds is not None and seconds >= 0


def _chunks(kind: str) -> bytes:
    """A file of 4 MiB whose header has nothing but very small parts."""
    if kind == "PNG":
        file = io.BytesIO()
        Image.new("L", (4, 4)).save(file, "PNG")
        head, rest = file.getvalue()[:33], file.getvalue()[33:]
        chunk = struct.pack(">I", 0) + b"abCd"
        return head + (chunk + struct.pack(">I", zlib.crc32(b"abCd"))) * (1 << 18) + rest
    if kind == "GIF":
        return b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0, 0, 0) + b"\x21\xfe" + b"\x01x" * (1 << 21)
    return b"RIFF\x00\x00\x40\x00WEBP" + (b"abCd" + bytes(4)) * (1 << 19)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
@pytest.mark.parametrize("is_path", [False, True])
def test_a_header_of_very_many_parts_is_not_read_to_its_end(kind: str, is_path: bool, tmp_path: Path) -> None:
    media: object = _chunks(kind)
    if is_path:
        (tmp_path / "media").write_bytes(_chunks(kind))
        media = tmp_path / "media"
    with pytest.raises(MediaError, match="its header has more parts than are read"):
        header_of(media)
    if kind == "PNG":
        with pytest.raises(MediaError, match="its header has more parts than are read"):
            measure_image(media, LIMITS)


def test_a_header_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_HEADER_SECONDS", -1.0)
    with pytest.raises(MediaError, match="its header has more parts than are read"):
        header_of(_chunks("GIF")[:1500])
