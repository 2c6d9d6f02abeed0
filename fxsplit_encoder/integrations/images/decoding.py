"""Encoded images to RGB, with limits that are checked before anything of that size is made."""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from fxsplit_encoder.errors import MediaError
from fxsplit_encoder.integrations.images.settings import ImageEncoderSettings

# Pillow knows more; among them are some that start other programs.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


def decode_image(data: bytes | memoryview, settings: ImageEncoderSettings) -> Image.Image:
    """An encoded image, upright and RGB.

    Raises:
        MediaError: it is none, it is animated, or it is beyond a limit of the settings.
    """
    if len(data) > settings.max_image_bytes:
        limit = f"expected at most {settings.max_image_bytes}, the limit max_image_bytes"
        raise MediaError(f"image of {len(data)} bytes; {limit}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check(image, settings)
                return ImageOps.exif_transpose(image).convert("RGB")
    except MediaError:
        raise
    except UnidentifiedImageError:  # its message has an address in memory
        raise MediaError("cannot be read as an image: it has none of the known formats") from None
    except Exception as error:  # Pillow's readers raise errors of many kinds for malformed files
        raise MediaError(f"cannot be read as an image: {str(error) or type(error).__name__}") from None


def _check(image: Image.Image, settings: ImageEncoderSettings) -> None:
    pixels = image.width * image.height
    if pixels > settings.max_pixels:
        limit = f"expected at most {settings.max_pixels} pixels, the limit max_pixels"
        raise MediaError(f"image of {image.width} x {image.height}; {limit}")
    # A JPEG that holds further pictures, as telephones write it, is one image: its first.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise MediaError(f"it has {getattr(image, 'n_frames', 'several')} frames; expected a single image")
