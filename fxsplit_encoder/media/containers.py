"""Video files and streams, which torchcodec decodes with FFmpeg."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fxsplit_encoder.errors import MediaError, MissingExtraError
from fxsplit_encoder.media.sources import attempt
from fxsplit_encoder.media.videos import Video, VideoHeader

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
