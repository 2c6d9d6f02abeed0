"""Readers of videos: animated images by Pillow, video files by torchcodec, and frames already decoded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media.images import lock_of, open_image
from fxsplit_encoder.media.sources import (
    HeaderReader,
    MediaSettings,
    attempt,
    imported,
    is_encoded,
    name_of,
    rgb_of,
)
from fxsplit_encoder.media.videos import DecodedVideo, Video, VideoFrames, VideoHeader


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
        if kind == b"!":  # an extension
            if file.read(1) == b"\xf9":  # of which this one is for the next image
                yield 10 * int.from_bytes(file.read(5)[2:4], "little")
            _skip_blocks(file)
        elif kind == b",":  # an image
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


_FORMATS = (
    (re.compile(rb"RIFF....WEBP", re.DOTALL), _webp),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    (re.compile(rb"GIF8"), _gif),
)


def animation_seconds(file: HeaderReader) -> float | None:
    """The sum of its frames' durations in seconds, of a file at its beginning; no frame is decoded.

    Returns:
        0.0 where the file does not tell: it is malformed, or its frames have no duration. None: it is of
        another kind, which a decoder of videos reads and not Pillow.
    """
    start = file.read(12)
    file.seek(0)
    for magic, milliseconds in _FORMATS:
        if magic.match(start):
            return sum(milliseconds(file)) / 1000
    return None


class AnimatedImage(Video):
    """An animated image. An image that does not move is a video of one frame.

    Args:
        image: as it was opened.
        background: what transparent pixels are composited over.
        seconds: its length; 0: not known.
        is_own: whether it is closed with the video.
    """

    def __init__(
        self, image: Image.Image, background: tuple[int, int, int], seconds: float = 0.0, is_own: bool = False
    ) -> None:
        self._image, self._background, self._is_own = image, background, is_own
        with attempt("video", "an animated image"):
            count = int(getattr(image, "n_frames", 1))
        self.header = VideoHeader(count, image.width, image.height, count / seconds if seconds else None)

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
        codec = imported("torchcodec.decoders", "FFmpeg's shared libraries", "decoding video files", "video")
        decoder = codec.VideoDecoder
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
    with contextlib.ExitStack() as closing:
        video = _open(media, limits, closing)
        header = video.header
        limits.check("max_pixels", header.width * header.height, "video")
        if header.fps:
            limits.check("max_seconds", header.num_frames / header.fps, "video")
        closing.pop_all()
    return video


def _open(media: object, limits: MediaSettings, closing: contextlib.ExitStack) -> Video:
    """A video, and what has to be closed unless it is returned."""
    if isinstance(media, Image.Image):
        video = AnimatedImage(media, limits.background)
        limits.check("max_frames", video.header.num_frames, "video")  # its digest takes all of them
        return video
    if not is_encoded(media):
        return DecodedVideo(media if isinstance(media, VideoFrames) else VideoFrames(media), limits)
    name = name_of(media)
    reader = closing.enter_context(contextlib.closing(HeaderReader(media, limits)))
    with attempt(name, "a video"), reader.limited():
        seconds = animation_seconds(reader)
        reader.seek(0)
    if seconds is None:
        closing.close()
        return ContainedVideo(reader.source, name)
    image = open_image(reader, limits, name)
    with reader.limited():
        return AnimatedImage(image, limits.background, seconds, is_own=True)
