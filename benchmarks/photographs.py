"""Encoded photographs, as a camera or the web has them."""

from __future__ import annotations

import io

from PIL import Image
from storage import ROOT

PHOTOGRAPH = (640, 480)
"""(width, height)."""


def photographs(size: tuple[int, int]) -> list[bytes]:
    """The examples as JPEG files of one size."""
    return [_encoded(Image.open(path), size) for path in sorted((ROOT / "examples" / "images").iterdir())]


def _encoded(image: Image.Image, size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    image.convert("RGB").resize(size).save(stream, "JPEG", quality=90)
    return stream.getvalue()
