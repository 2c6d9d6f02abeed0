"""Videos: what is known from the header, and the frames that are asked for, decoded one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media.images import load_image, measure_image, pixel_bytes, scaled, shrunk
from fxsplit_encoder.media.sources import ARRAYS, MediaSettings, Pixels, pixels_of
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

    def select(self, indices: Sequence[int], limits: MediaSettings, scale: float = 1.0) -> Frames:
        """Some frames, rising by index, of which the same may come twice, with their sides shrunk.
        MediaError: more frames have to be decoded for them than the limit allows.
        """
        limits.check("max_frames", self.num_decoded(indices), "video")
        return Frames(self, indices, scale)

    def num_decoded(self, indices: Sequence[int]) -> int:
        """Number of frames to decode for some of them."""
        return len(indices)

    @abstractmethod
    def decode(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Frames one after another, RGB; MediaError: one cannot be decoded."""

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yields the bytes that a decoded video's digest covers: every frame."""
        yield f"video {self.header.fps}".encode()
        for frame in self.pixels():
            yield from pixel_bytes(frame)

    def pixels(self) -> Iterator[Image.Image | Pixels]:
        """Every frame, RGB."""
        return self.decode(range(self.header.num_frames))

    def close(self) -> None:  # noqa: B027 - most have opened nothing
        """Gives back what was opened."""


@dataclass(frozen=True, eq=False)
class Frames:
    """The chosen frames of a video, decoded during iteration. All have the header's size."""

    video: Video
    indices: Sequence[int]
    scale: float = 1.0
    """By which both sides of the video's frames are shrunk."""

    @property
    def width(self) -> int:
        """In pixels."""
        return scaled(self.video.header.width, self.scale)

    @property
    def height(self) -> int:
        """In pixels."""
        return scaled(self.video.header.height, self.scale)

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
        self._frames = _listed(video.frames)
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

    def pixels(self) -> Iterator[Image.Image | Pixels]:
        """Every frame, arrays without making images of them."""
        for frame in self._frames:
            is_array = isinstance(frame, ARRAYS)
            yield pixels_of(frame, self._limits, "video") if is_array else load_image(frame, self._limits)


def _listed(frames: object) -> Sequence[Any]:
    if isinstance(frames, ARRAYS):
        if frames.ndim != 4 or not len(frames):
            raise MediaError(f"video: expected (frames, height, width, 3); got {tuple(frames.shape)}")
        return list(frames)
    if not isinstance(frames, list | tuple) or not frames:
        raise MediaError(
            f"video: expected VideoFrames, bytes, a path or a list of frames; got {shown(frames)}"
        )
    return frames
