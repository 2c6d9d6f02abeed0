"""Animated images, which Pillow decodes, as videos."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from PIL import Image

from fxsplit_encoder.media.images import lock_of
from fxsplit_encoder.media.sources import attempt
from fxsplit_encoder.media.videos import Video, VideoHeader


class AnimatedImage(Video):
    """An animated image. An image that does not move is a video of one frame.

    Args:
        image: as it was opened.
        seconds: its length; None: not known.
        is_own: whether it is closed with the video.
    """

    def __init__(self, image: Image.Image, seconds: float | None, is_own: bool) -> None:
        self._image = image
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
                yield self._image.convert("RGB")

    def close(self) -> None:
        """Closes the image, if it was opened for this."""
        if self._is_own:
            with contextlib.suppress(OSError):
                self._image.close()
