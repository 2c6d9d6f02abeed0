"""Photographs, encoded images, and settings of tiny checkpoints."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from fxsplit_encoder.service.settings import ImageEncoderSettings

EXAMPLES = Path(__file__).parents[2] / "examples" / "images"


def photograph(name: str = "cat", size: tuple[int, int] = (120, 90)) -> Image.Image:
    return Image.open(EXAMPLES / f"{name}.jpg").convert("RGB").resize(size)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64(data)}"


def blank(side: int) -> bytes:
    """A square of little data and many pixels."""
    return encoded(Image.new("1", (side, side)))


def settings_of(directory: Path, **settings: object) -> ImageEncoderSettings:
    """Without a compilation, which takes longer than a test of what is around it."""
    return ImageEncoderSettings(**{"model": str(directory), "config": {"enabled": False}, **settings})
