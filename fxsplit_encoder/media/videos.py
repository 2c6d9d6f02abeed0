"""Videos: what is known from the header, and the frames that are asked for, decoded one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media.images import load_image, measure_image, pixel_bytes, scaled, shrunk
from fxsplit_encoder.media.sources import MediaSettings, pixels_of, shape_of
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
        """Some frames, rising by index; the same may come twice.

        Args:
            indices: of the frames.
            limits: of frames.
            scale: by which their sides are shrunk.

        Raises:
            MediaError: more frames have to be decoded for them than the limit allows.
        """
        limits.check("max_frames", self.num_decoded(indices), "video")
        return Frames(self, indices, scale)

    def num_decoded(self, indices: Sequence[int]) -> int:
        """Number of frames to decode for some of them."""
        return len(indices)

    @abstractmethod
    def decode(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Frames one after another, RGB.

        Raises:
            MediaError: one cannot be decoded.
        """

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yields the bytes that a decoded video's digest covers: every frame."""
        yield from _header_parts(self.header)
        for frame in Frames(self, range(self.header.num_frames)):
            yield from pixel_bytes(frame)

    def close(self) -> None:
        """Gives back what was opened."""
        return None


def _header_parts(header: VideoHeader) -> list[bytes]:
    return [f"video {header.fps}".encode()]


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
    """Read a video from decoded frames.

    Raises:
        MediaError: they are no images, or have different sizes.
    """

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

    def parts(self) -> Iterator[bytes | memoryview]:
        """The same as of images, of arrays without making images of them."""
        if any(shape_of(frame) is None for frame in self._frames):
            yield from super().parts()
            return
        yield from _header_parts(self.header)
        for frame in self._frames:
            yield from pixel_bytes(pixels_of(frame, self._limits, "video"))


def _listed(frames: object) -> Sequence[Any]:
    if isinstance(frames, np.ndarray | torch.Tensor):
        if frames.ndim != 4 or not len(frames):
            raise MediaError(f"video: expected (frames, height, width, 3); got {tuple(frames.shape)}")
        return list(frames)
    if not isinstance(frames, list | tuple) or not frames:
        raise MediaError(
            f"video: expected VideoFrames, bytes, a path or a list of frames; got {shown(frames)}"
        )
    return frames


def frame_seconds(indices: Sequence[int], header: VideoHeader, step: int) -> dict[str, object]:
    """When a video's frames are: what prompts and positions in time are made of. Empty where it is not known.

    Returns:
        `frame_seconds`, of every frame that is seen; `grid_seconds`, the middle of the first and the last of
        the `step` frames that become one; and `seconds_per_grid`, how long those last.
    """
    if header.fps is None:
        return {}
    seconds = [index / header.fps for index in indices]
    grids = [seconds[start : start + step] for start in range(0, len(seconds), step)]
    seen_a_second = len(indices) / header.num_frames * header.fps
    return {
        "frame_seconds": tuple(seconds),
        "grid_seconds": tuple((group[0] + group[-1]) / 2 for group in grids),
        "seconds_per_grid": step / seen_a_second,
    }
