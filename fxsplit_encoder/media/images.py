"""Images: their size from the header, and their pixels, upright and RGB."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from PIL import ExifTags, Image, UnidentifiedImageError

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media.sources import (
    ARRAYS,
    HeaderReader,
    MediaSettings,
    Pixels,
    attempt,
    image_shape,
    is_encoded,
    name_of,
    pixels_of,
    rgb_of,
)
from fxsplit_encoder.messages import shown

# Pillow knows more; among them are some that start other programs.
_WANTED = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
Image.init()
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)
"""Those that are read, as far as this Pillow was built with them."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPPED = (5, 6, 7, 8)

# An image that was opened and not decoded shares its file between all who hold it.
_LOCKS = tuple(threading.Lock() for _ in range(64))


def measure_image(media: object, limits: MediaSettings) -> tuple[int, int]:
    """Width and height of an image, upright, from its header; nothing is decoded.

    Args:
        media: a PIL image; an array or tensor of uint8, (height, width) or with 1, 3 or 4 channels, last or
            first; encoded bytes; or a path.
        limits: of bytes and pixels.

    Raises:
        MediaError: it is no image, or beyond a limit.
    """
    if is_encoded(media) or isinstance(media, Image.Image):
        with opened_image(media, limits) as image:
            width, height = image.size
            return (height, width) if _orientation(image) in _SWAPPED else (width, height)
    if not isinstance(media, ARRAYS):
        raise MediaError(
            f"image: expected a PIL image, an array of uint8, bytes or a path; got {shown(media)}"
        )
    height, width, _ = image_shape(tuple(media.shape), "image")
    limits.check("max_pixels", height * width, "image")
    return width, height


def load_image(media: object, limits: MediaSettings) -> Image.Image:
    """The pixels of an image, as `measure_image` takes it, upright and RGB, over the background. Of several
    pictures it is the first. MediaError: it cannot be decoded, or is beyond a limit.
    """
    if is_encoded(media) or isinstance(media, Image.Image):
        with (
            opened_image(media, limits) as image,
            lock_of(image),
            attempt(name_of(media), "an image"),
        ):
            return upright(image, limits.background)
    return Image.fromarray(pixels_of(media, limits, "image"))


@contextlib.contextmanager
def opened_image(media: object, limits: MediaSettings) -> Iterator[Image.Image]:
    """A PIL image, or an encoded one of which the header was read, whose file is closed afterwards.
    MediaError: it is no image of a known format, or is beyond a limit.
    """
    if isinstance(media, Image.Image):
        limits.check("max_pixels", media.width * media.height, "image")
        yield media
        return
    with contextlib.closing(HeaderReader(media, limits)) as reader:
        yield open_image(reader, limits, name_of(media))


def open_image(reader: HeaderReader, limits: MediaSettings, name: str) -> Image.Image:
    """An image whose file stays open; see `opened_image`."""
    file: Any = reader
    with attempt(name, "an image"), reader.limited():
        try:
            image = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            formats = ", ".join(FORMATS)
            raise MediaError(f"{name}: cannot be read as an image; expected one of {formats}") from None
    limits.check("max_pixels", image.width * image.height, name)
    return image


def upright(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """An image turned as its metadata says, RGB over a background."""
    turn = _TURNS.get(_orientation(image))  # before it is decoded, when `measure_image` has read it
    rgb = rgb_of(image, background)
    return rgb if turn is None else rgb.transpose(turn)


def scaled(side: int, scale: float) -> int:
    """A side in pixels after an image was shrunk."""
    return max(1, round(side * scale))


def shrunk(image: Image.Image, scale: float) -> Image.Image:
    """An image with both sides shrunk."""
    return bicubic(image, (scaled(image.width, scale), scaled(image.height, scale)))


def bicubic(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image of (width, height); the same one if it has that size, whose pixels would stay as they are."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def lock_of(image: Image.Image) -> threading.Lock:
    """Held while an image of the caller's is read."""
    return _LOCKS[id(image) % len(_LOCKS)]


def _orientation(image: Image.Image) -> int:
    # A PNG's own method decodes it, to find metadata behind the pixels.
    with contextlib.suppress(Exception):
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    return 1


def pixel_bytes(image: Image.Image | Pixels) -> list[bytes | memoryview]:
    """Returns the bytes that an RGB image's digest covers, equal for the array of its pixels."""
    if isinstance(image, Image.Image):
        return [f"pixels {image.width}x{image.height}".encode(), image.tobytes()]
    height, width, _ = image.shape
    return [f"pixels {width}x{height}".encode(), image.data.cast("B")]
