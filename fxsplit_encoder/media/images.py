"""Images: their size from the header, and their pixels, upright and RGB."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.media.sources import (
    ARRAYS,
    Encoded,
    HeaderReader,
    MediaSettings,
    attempt,
    is_encoded,
    name_of,
)
from fxsplit_encoder.messages import shown

logger = logging.getLogger(__name__)

# Pillow knows more; among them are some that start other programs.
_WANTED = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
Image.init()
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)
"""Those that are read, as far as this Pillow was built with them."""

# By the orientation of an image's metadata; from 5 to 8 its sides are swapped.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Pixels = NDArray[np.uint8]
"""(height, width, 3)."""

_CHANNELS = (1, 3, 4)

# Some cameras write more after the end of an image.
_TRAILER_BYTES = 256

# An image that was opened and not decoded shares its file between all who hold it.
_LOCKS = tuple(threading.Lock() for _ in range(64))


class OnHost(Counter[str]):
    """Images of which the host did more than `on_device` asks of it, by the reason."""

    observe: Callable[[str], None] | None = None
    """Is called with each reason too."""
    _lock = threading.Lock()

    def add(self, reason: str) -> None:
        """Counts an image, from any thread; the first of each reason is a warning."""
        with self._lock:
            self[reason] += 1
            is_first = self[reason] == 1
        if is_first:
            logger.warning("on_device: the host does more: %s", reason)
        if self.observe is not None:
            self.observe(reason)


def measure_image(media: object, limits: MediaSettings) -> tuple[int, int]:
    """Width and height of an image, upright, from its header; nothing is decoded.

    Args:
        media: a PIL image; an array or tensor of uint8, (height, width) or with 1, 3 or 4 channels, last or
            first; encoded bytes; or a path.
        limits: of bytes and pixels.

    Raises:
        MediaError: it is no image, or beyond a limit.
    """
    if isinstance(media, ARRAYS):
        height, width, _ = _channels_last(media, limits).shape
        return width, height
    with opened_image(media, limits) as image:
        width, height = image.size
        return (height, width) if 5 <= _orientation(image) <= 8 else (width, height)


def load_image(media: object, limits: MediaSettings) -> Image.Image:
    """The pixels of an image, as `measure_image` takes it, upright and RGB, over the background. Of several
    pictures it is the first. MediaError: it cannot be decoded, or is beyond a limit.
    """
    if isinstance(media, ARRAYS):
        return Image.fromarray(pixels_of(media, limits))
    with opened_image(media, limits) as image, lock_of(image), attempt(name_of(media), "an image"):
        turn = _TURNS.get(_orientation(image))  # before it is decoded, when `measure_image` has read it
        rgb = rgb_of(image, limits.background)
        return rgb if turn is None else rgb.transpose(turn)


@contextlib.contextmanager
def opened_image(media: object, limits: MediaSettings) -> Iterator[Image.Image]:
    """A PIL image, or an encoded one of which the header was read, whose file is closed afterwards.
    MediaError: it is no image of a known format, or is beyond a limit.
    """
    if isinstance(media, Image.Image):
        limits.check("max_pixels", media.width * media.height, "image")
        yield media
        return
    if not is_encoded(media):
        raise MediaError(
            f"image: expected a PIL image, an array of uint8, bytes or a path; got {shown(media)}"
        )
    name = name_of(media)
    file: Any = HeaderReader(media, limits)
    with contextlib.closing(file):
        with attempt(name, "an image"):
            try:
                image = Image.open(file, formats=FORMATS)
            except UnidentifiedImageError:
                formats = ", ".join(FORMATS)
                raise MediaError(f"{name}: cannot be read as an image; expected one of {formats}") from None
        file.unlimit()
        limits.check("max_pixels", image.width * image.height, name)
        yield image


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
        if image.format != "TIFF":  # which Pillow turns
            return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    return 1


def pixel_bytes(pixels: Pixels) -> list[bytes | memoryview]:
    """Returns the bytes that the digest of an image's pixels covers."""
    height, width, _ = pixels.shape
    return [f"pixels {width}x{height}".encode(), pixels.data.cast("B")]


# --- what a device does

BICUBIC, BILINEAR = int(Image.Resampling.BICUBIC), int(Image.Resampling.BILINEAR)


PIXEL_PLAN = "pixel_plan"
"""Among an image's inputs, the integers of a `ResizePlan`, then an orientation: its encoder prepares its
uint8 input, which was decoded, (height, width, 3), or is a JPEG file, (bytes,), to be turned upright."""


class ResizePlan(NamedTuple):
    """How an image becomes patches; it travels with the item as integers."""

    height: int
    """To which the image is resized."""
    width: int
    rows: int
    """Of patches, which are cut from the middle of what was resized."""
    columns: int
    side: int
    """Of a patch, in pixels."""
    merge: int = 1
    """Side in patches of the blocks by which they go."""
    frames: int = 0
    """Equal frames of a patch, which is then one row of numbers; 0: it is a tile, (3, side, side)."""
    filter: int = BICUBIC


def jpeg_orientation(media: object, limits: MediaSettings) -> int | str:
    """By which a JPEG file is to be turned that a GPU decodes, from its header; or what it is that the GPU
    does not decode. MediaError: it is no image, or is beyond a limit.
    """
    if not isinstance(media, Encoded):
        return "no encoded bytes"
    with opened_image(media, limits) as image:
        if image.format != "JPEG":
            return f"{image.format}"
        if image.mode != "RGB" or image.info.get("adobe_transform") == 0:
            return f"JPEG of other colors than YCbCr, mode {image.mode}"
        if "progressive" in image.info:
            return "progressive JPEG"
        if b"\xff\xd9" not in bytes(memoryview(media)[-_TRAILER_BYTES:]):
            return "JPEG without an end"
        return _orientation(image)


# --- arrays and modes


def pixels_of(media: Any, limits: MediaSettings) -> Pixels:
    """The pixels of `load_image`, without making an image of an array."""
    if not isinstance(media, ARRAYS):
        return np.asarray(load_image(media, limits))
    view = _channels_last(media, limits)
    given = view.detach().cpu().numpy() if isinstance(view, torch.Tensor) else view
    if given.shape[2] == 4:
        return np.asarray(rgb_of(Image.fromarray(np.ascontiguousarray(given)), limits.background))
    return np.ascontiguousarray(np.broadcast_to(given, (*given.shape[:2], 3)))


def _channels_last(array: Any, limits: MediaSettings) -> Any:
    """A view of one image, (height, width, channels), of an array or a tensor of uint8, (height, width), or
    with 1, 3 or 4 channels, last or first, the fourth of them alpha; MediaError: it is something else.
    """
    view = array[..., None] if array.ndim == 2 else array
    if view.ndim == 3 and view.shape[-1] not in _CHANNELS and view.shape[0] in _CHANNELS:
        view = view.permute(1, 2, 0) if isinstance(view, torch.Tensor) else view.transpose(1, 2, 0)
    if view.ndim != 3 or view.shape[-1] not in _CHANNELS or 0 in view.shape:
        got = tuple(array.shape)
        raise MediaError(f"image: expected (height, width), or with 1, 3 or 4 channels; got {got}")
    if str(array.dtype).removeprefix("torch.") != "uint8":
        raise MediaError(f"image: expected an array of uint8; got {shown(array)}")
    limits.check("max_bytes", array.nbytes, "image")
    limits.check("max_pixels", view.shape[0] * view.shape[1], "image")
    return view


def rgb_of(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Convert an image of any of Pillow's modes to RGB; an opaque RGB image is returned as it is.

    Grayscale of 16 bits is shifted by 8 bits. Floats have no range by themselves: up to 1 they are a part of
    white, up to 255 values of 8 bits, above that of 16. Transparent pixels are composited over `background`.
    """
    image.load()  # until then a decoder may know another mode
    if image.mode[0] in "IF":
        image = _in_eight_bits(image)
    elif image.mode == "La":
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgba, opaque = image.convert("RGBA"), Image.new("RGB", image.size, tuple(background))
    opaque.paste(rgba, mask=rgba.getchannel("A"))
    return opaque


def _in_eight_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
        most = float(values.max(initial=0.0))
        scale = 255.0 if most <= 1 else 1.0 if most <= 255 else 1 / 256
        gray = Image.fromarray(np.clip(values * scale, 0, 255).astype(np.uint8))
    else:
        gray = Image.fromarray((np.clip(values, 0, 0xFFFF) >> 8).astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        gray.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return gray
