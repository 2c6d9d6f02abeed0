"""Videos: what is known from the header, and the frames that are asked for, decoded one after another.

Frames come already decoded, from animated images by Pillow, or from video files by torchcodec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media.images import (
    Pixels,
    load_image,
    lock_of,
    measure_image,
    opened_image,
    pixel_bytes,
    pixels_of,
    rgb_of,
    scaled,
    shrunk,
)
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


@dataclass(frozen=True, eq=False)
class VideoFrames:
    """A decoded video: frames and their rate."""

    frames: Any
    """Images of one size, in order, each as `load_image` takes it; or one array or tensor of uint8, such as
    (frames, height, width, 3)."""

    fps: float | None = None
    """Frames per second; None: not known."""


@dataclass(frozen=True)
class VideoHeader:
    """Frames, size and rate of a video, read before anything is decoded."""

    num_frames: int
    width: int
    height: int
    fps: float | None
    """Frames per second, the mean of them; None: not known."""


class Video(ABC):
    """A video of which the header was read."""

    header: VideoHeader
    is_sequential = False
    """Whether a frame is decoded on top of all those before it."""

    def select(self, indices: Sequence[int], limits: MediaSettings, scale: float = 1.0) -> Frames:
        """Some frames, rising by index, of which the same may come twice, with their sides shrunk.
        MediaError: more frames have to be decoded for them than the limit allows.
        """
        count = max(indices) + 1 if self.is_sequential else len(indices)
        limits.check("max_frames", count, "video")
        return Frames(self, indices, scale)

    @abstractmethod
    def decode(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Frames one after another, RGB; MediaError: one cannot be decoded."""

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yields the bytes that a decoded video's digest covers: every frame."""
        yield f"video {self.header.fps}".encode()
        for frame in self.pixels():
            yield from pixel_bytes(frame)

    def pixels(self) -> Iterator[Pixels]:
        """Every frame, RGB."""
        return map(np.asarray, self.decode(range(self.header.num_frames)))


@dataclass(frozen=True, eq=False)
class Frames:
    """The chosen frames of a video, decoded during iteration. All have the header's size."""

    video: Video
    indices: Sequence[int]
    scale: float = 1.0
    """By which both sides of the video's frames are shrunk."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        header = self.video.header
        return scaled(header.width, self.scale), scaled(header.height, self.scale)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Image.Image]:
        width, height = self.video.header.width, self.video.header.height
        for frame in self.video.decode(self.indices):
            if frame.size != (width, height):
                got = f"{frame.width} x {frame.height}"
                raise MediaError(f"video: expected frames of {width} x {height} pixels; got {got}")
            yield shrunk(frame, self.scale)


class DecodedVideo(Video):
    """Read a video from decoded frames; MediaError: they are no images, or have different sizes."""

    def __init__(self, video: VideoFrames, limits: MediaSettings) -> None:
        frames = video.frames
        if isinstance(frames, ARRAYS):
            if frames.ndim != 4 or not len(frames):
                raise MediaError(f"video: expected (frames, height, width, 3); got {tuple(frames.shape)}")
        elif not isinstance(frames, list | tuple) or not frames:
            raise MediaError(
                f"video: expected VideoFrames, bytes, a path or a list of frames; got {shown(frames)}"
            )
        self._frames: Sequence[Any] = list(frames)
        self._limits = limits
        sizes = {measure_image(frame, limits) for frame in self._frames}
        if len(sizes) != 1:
            raise MediaError(f"video: expected frames of one size; got {shown(sorted(sizes))}")
        if video.fps is not None and not video.fps > 0:
            raise MediaError(f"video: expected frames per second above 0, or None; got {video.fps}")
        ((width, height),) = sizes
        self.header = VideoHeader(len(self._frames), width, height, video.fps)

    def decode(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames as RGB images."""
        return (load_image(self._frames[index], self._limits) for index in indices)

    def pixels(self) -> Iterator[Pixels]:
        """Every frame, arrays without making images of them."""
        return (pixels_of(frame, self._limits) for frame in self._frames)


# --- animated images


class AnimatedImage(Video):
    """An animated image over a background, of so many seconds (0: not known). An image that does not move is
    a video of one frame.
    """

    is_sequential = True

    def __init__(self, image: Image.Image, background: tuple[int, int, int], seconds: float = 0.0) -> None:
        self._image, self._background = image, background
        with attempt("video", "an animated image"):
            count = int(getattr(image, "n_frames", 1))
        self.header = VideoHeader(count, image.width, image.height, count / seconds if seconds else None)

    def decode(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames as RGB images. They are not turned."""
        with lock_of(self._image), attempt("video", "an animated image"):
            for index in indices:
                self._image.seek(index)
                frame = rgb_of(self._image, self._background)
                yield frame.copy() if frame is self._image else frame


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
    file.seek(0)
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


def animation_seconds(file: HeaderReader) -> float | None:
    """The sum of its frames' durations in seconds, of a file at its beginning; no frame is decoded.

    Returns:
        0.0 where the file does not tell: it is malformed, or its frames have no duration. None: it is of
        another kind, which a decoder of videos reads and not Pillow.
    """
    start = file.read(12)
    if start.startswith(b"GIF8"):
        milliseconds = _gif(file)
    elif start.startswith(b"\x89PNG\r\n\x1a\n"):
        milliseconds = _png(file)
    elif start.startswith(b"RIFF") and start.endswith(b"WEBP"):
        milliseconds = _webp(file)
    else:
        return None
    return sum(milliseconds) / 1000


# --- files of videos

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
        for mode in ("approximate", "exact"):
            with attempt(name, "a video"):
                self._decoder = codec.VideoDecoder(
                    source, seek_mode=mode, dimension_order="NHWC", num_ffmpeg_threads=1
                )
            found = self._decoder.metadata
            numbers = (found.num_frames, found.average_fps, found.width, found.height)
            if all(number is not None and number > 0 for number in numbers):
                break
        else:
            raise MediaError(f"{name}: FFmpeg finds no frames in it, or no size or rate of them")
        self.header = VideoHeader(found.num_frames, found.width, found.height, found.average_fps)

    def decode(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames as RGB images, turned as the file says."""
        for start in range(0, len(indices), _AT_ONCE):
            with attempt(self._name, "a video"):
                frames = self._decoder.get_frames_at(list(indices[start : start + _AT_ONCE])).data
            yield from (Image.fromarray(frame.numpy()) for frame in frames)


@contextmanager
def open_video(media: object, limits: MediaSettings) -> Iterator[Video]:
    """Reads what a video's header says; nothing is decoded.

    Args:
        media: `VideoFrames`, or their `frames` alone; an animated PIL image; encoded bytes or a path, of an
            animated WebP, GIF or PNG, or of anything that FFmpeg reads.
        limits: of bytes, pixels and seconds; `Video.select` checks the frames.

    Raises:
        MediaError: it is no video, or beyond a limit.
        MissingExtraError: FFmpeg has to read it, and torchcodec is not installed.
    """
    with ExitStack() as opened:
        video = _open(media, limits, opened)
        header = video.header
        limits.check("max_pixels", header.width * header.height, "video")
        if header.fps:
            limits.check("max_seconds", header.num_frames / header.fps, "video")
        yield video


def _open(media: object, limits: MediaSettings, opened: ExitStack) -> Video:
    """A video, and what has to be closed with it."""
    if isinstance(media, Image.Image):
        video = AnimatedImage(media, limits.background)
        limits.check("max_frames", video.header.num_frames, "video")  # its digest takes all of them
        return video
    if not is_encoded(media):
        return DecodedVideo(media if isinstance(media, VideoFrames) else VideoFrames(media), limits)
    name = name_of(media)
    with closing(HeaderReader(media, limits)) as reader, attempt(name, "a video"):
        seconds = animation_seconds(reader)
    if seconds is None:
        return ContainedVideo(reader.source, name)
    image = opened.enter_context(opened_image(media, limits))
    return AnimatedImage(image, limits.background, seconds)
