"""Readers of videos: animated images by Pillow, video files by torchcodec, and frames already decoded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fxsplit_encoder.errors import MediaError, MissingExtraError
from fxsplit_encoder.media.images import lock_of, open_image
from fxsplit_encoder.media.sources import (
    HeaderReader,
    MediaSettings,
    attempt,
    header_source,
    is_encoded,
    name_of,
    rgb_of,
)
from fxsplit_encoder.media.videos import DecodedVideo, Video, VideoFrames, VideoHeader

_GIF_EXTENSION, _GIF_IMAGE, _GIF_CONTROL = 0x21, 0x2C, 0xF9


def animation_seconds(file: HeaderReader) -> float | None:
    """The sum of its frames' durations in seconds, of a file at its beginning; no frame is decoded.

    Returns:
        None where the file does not tell: it is malformed, of another kind, or its frames have no duration.
    """
    start = file.read(12)
    for magic, milliseconds in _FORMATS:
        if start.startswith(magic):
            file.seek(0)
            total = sum(milliseconds(file))
            return total / 1000 if total > 0 else None
    return None


def _webp(file: HeaderReader) -> Iterator[float]:
    file.seek(12)
    while len(head := file.read(8)) == 8:
        size = int.from_bytes(head[4:], "little")
        end = file.tell() + size + size % 2
        if head[:4] == b"ANMF":
            yield int.from_bytes(file.read(15)[12:], "little")
        file.seek(end)


def _png(file: HeaderReader) -> Iterator[float]:
    file.seek(8)
    while len(head := file.read(8)) == 8:
        end = file.tell() + int.from_bytes(head[:4], "big") + 4
        if head[4:] == b"fcTL":
            delay = file.read(24)[20:]
            yield 1000 * int.from_bytes(delay[:2], "big") / (int.from_bytes(delay[2:], "big") or 100)
        file.seek(end)


def _gif(file: HeaderReader) -> Iterator[float]:
    _skip_colors(file, file.read(13)[10:11])
    while kind := file.read(1):
        if kind[0] == _GIF_EXTENSION:
            label = file.read(1)
            if label and label[0] == _GIF_CONTROL:
                yield 10 * int.from_bytes(file.read(6)[2:4], "little")
            else:
                _skip_blocks(file)
        elif kind[0] == _GIF_IMAGE:
            _skip_colors(file, file.read(9)[8:])
            file.seek(1, 1)
            _skip_blocks(file)
        else:
            return


def _skip_colors(file: HeaderReader, flags: bytes) -> None:
    if flags and flags[0] & 0x80:
        file.seek(3 << (1 + (flags[0] & 7)), 1)


def _skip_blocks(file: HeaderReader) -> None:
    while (size := file.read(1)) and size[0]:
        file.seek(size[0], 1)


_FORMATS: tuple[tuple[bytes, Callable[[HeaderReader], Iterator[float]]], ...] = (
    (b"RIFF", _webp),
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"GIF8", _gif),
)


def is_animation(start: bytes) -> bool:
    """Whether Pillow, and not a decoder of videos, reads a file that starts so."""
    is_webp = start.startswith(b"RIFF") and start[8:12] == b"WEBP"
    return is_webp or start.startswith((b"\x89PNG\r\n\x1a\n", b"GIF8"))


class AnimatedImage(Video):
    """An animated image. An image that does not move is a video of one frame.

    Args:
        image: as it was opened.
        seconds: its length; None: not known.
        is_own: whether it is closed with the video.
        background: what transparent pixels are composited over.
    """

    def __init__(
        self, image: Image.Image, seconds: float | None, is_own: bool, background: tuple[int, int, int]
    ) -> None:
        self._image = image
        self._background = background
        self._is_own = is_own
        with attempt("video", "an animated image"):
            count = int(getattr(image, "n_frames", 1))
        fps = count / seconds if seconds else None
        self.header = VideoHeader(count, image.width, image.height, fps)

    def num_decoded(self, indices: Sequence[int]) -> int:
        """Every frame is decoded on top of those before it."""
        return max(indices) + 1

    def decode(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames as RGB images. They are not turned."""
        with lock_of(self._image), attempt("video", "an animated image"):
            for index in indices:
                if getattr(self._image, "is_animated", False):
                    self._image.seek(index)
                frame = rgb_of(self._image, self._background)
                yield frame.copy() if frame is self._image else frame

    def close(self) -> None:
        """Closes the image, if it was opened for this."""
        if self._is_own:
            with contextlib.suppress(OSError):
                self._image.close()


_AT_ONCE = 16
"""Frames that are decoded together: torchcodec looks once for those that lie close to one another."""


class ContainedVideo(Video):
    """The best video stream of a file.

    How many frames it has and how many a second is what its header says, or, where that says nothing, what
    a look at every packet finds. Frame i of n is then the one at i / n of the length.

    Raises:
        MediaError: FFmpeg cannot read it, or cannot be loaded.
        MissingExtraError: torchcodec is not installed.
    """

    def __init__(self, source: Path | bytes, name: str) -> None:
        self._name = name
        decoder = _decoder_class()
        with attempt(name, "a video"):
            self._decoder = decoder(source, seek_mode="approximate", **_OPTIONS)
            if not _is_complete(self._decoder.metadata):
                self._decoder = decoder(source, seek_mode="exact", **_OPTIONS)
            found = self._decoder.metadata
        if not _is_complete(found):
            raise MediaError(f"{name}: FFmpeg finds no frames in it, or no size or rate of them")
        self.header = VideoHeader(found.num_frames, found.width, found.height, found.average_fps)

    def decode(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames as RGB images, turned as the file says."""
        for start in range(0, len(indices), _AT_ONCE):
            with attempt(self._name, "a video"):
                frames = self._decoder.get_frames_at(list(indices[start : start + _AT_ONCE])).data
            yield from (Image.fromarray(frame.numpy()) for frame in frames)


_OPTIONS = {"dimension_order": "NHWC", "num_ffmpeg_threads": 1}


def _is_complete(metadata: Any) -> bool:
    numbers = (metadata.num_frames, metadata.average_fps, metadata.width, metadata.height)
    return all(number is not None and number > 0 for number in numbers)


def _decoder_class() -> Any:
    try:
        from torchcodec.decoders import VideoDecoder
    except ImportError as error:
        raise MissingExtraError("decoding video files", "video") from error
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MediaError(
            f"torchcodec cannot be loaded, which needs FFmpeg's shared libraries: {reason}"
        ) from error
    return VideoDecoder


def open_video(media: object, limits: MediaSettings) -> Video:
    """Reads what a video's header says; nothing is decoded. The video is to be closed.

    Args:
        media: `VideoFrames`, or their `frames` alone; an animated PIL image; encoded bytes or a path, of an
            animated WebP, GIF or PNG, or of anything that FFmpeg reads.
        limits: of bytes, pixels and seconds; `Video.select` checks the frames.

    Raises:
        MediaError: it is no video, or beyond a limit.
        MissingExtraError: FFmpeg has to read it, and torchcodec is not installed.
    """
    video = _open(media, limits)
    try:
        _check(video, limits)
    except MediaError:
        video.close()
        raise
    return video


def _check(video: Video, limits: MediaSettings) -> None:
    header = video.header
    limits.check("max_pixels", header.width * header.height, "video")
    if header.fps:
        limits.check("max_seconds", header.num_frames / header.fps, "video")


def _open(media: object, limits: MediaSettings) -> Video:
    if is_encoded(media):
        return _open_encoded(media, limits)
    if isinstance(media, Image.Image):
        video = AnimatedImage(media, None, is_own=False, background=limits.background)
        # Its digest takes all of them.
        limits.check("max_frames", video.header.num_frames, "video")
        return video
    return DecodedVideo(media if isinstance(media, VideoFrames) else VideoFrames(media), limits)


def _open_encoded(media: object, limits: MediaSettings) -> Video:
    name = name_of(media)
    source = header_source(media, limits)
    with attempt(name, "a video"):
        reader = HeaderReader(source)
    try:
        with attempt(name, "a video"), reader.limited():
            start = reader.read(16)
            reader.seek(0)
            seconds = animation_seconds(reader)
            reader.seek(0)
        if is_animation(start):
            image = open_image(reader, limits, name)
            with reader.limited():
                return AnimatedImage(image, seconds, is_own=True, background=limits.background)
    except MediaError:
        reader.close()
        raise
    if isinstance(source, Path):
        reader.close()
    return ContainedVideo(source if isinstance(source, Path) else source.getvalue(), name)
