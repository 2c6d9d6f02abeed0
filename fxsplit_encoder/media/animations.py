"""How long an animated WebP, GIF or PNG is, from the blocks of its file; no frame is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

_GIF_EXTENSION, _GIF_IMAGE, _GIF_CONTROL = 0x21, 0x2C, 0xF9


def animation_seconds(file: BinaryIO) -> float | None:
    """The sum of its frames' durations in seconds.

    Args:
        file: at its beginning, of any contents.

    Returns:
        None where the file does not tell: it is malformed, of another kind, or its frames have no duration.
    """
    start = file.read(12)
    for magic, milliseconds in _FORMATS:
        if start.startswith(magic):
            file.seek(0)
            total = sum(milliseconds(file))
            return total / 1000 if total > 0 else None
    return None


def _webp(file: BinaryIO) -> Iterator[float]:
    file.seek(12)
    while len(head := file.read(8)) == 8:
        size = int.from_bytes(head[4:], "little")
        end = file.tell() + size + size % 2
        if head[:4] == b"ANMF":
            yield int.from_bytes(file.read(15)[12:], "little")
        file.seek(end)


def _png(file: BinaryIO) -> Iterator[float]:
    file.seek(8)
    while len(head := file.read(8)) == 8:
        end = file.tell() + int.from_bytes(head[:4], "big") + 4
        if head[4:] == b"fcTL":
            delay = file.read(24)[20:]
            yield 1000 * int.from_bytes(delay[:2], "big") / (int.from_bytes(delay[2:], "big") or 100)
        file.seek(end)


def _gif(file: BinaryIO) -> Iterator[float]:
    _skip_colors(file, file.read(13)[10:11])
    while kind := file.read(1):
        if kind[0] == _GIF_EXTENSION:
            label = file.read(1)
            if label and label[0] == _GIF_CONTROL:
                yield 10 * int.from_bytes(file.read(6)[2:4], "little")
            else:
                _skip_blocks(file)
        elif kind[0] == _GIF_IMAGE:
            _skip_colors(file, file.read(9)[8:])
            file.seek(1, 1)
            _skip_blocks(file)
        else:
            return


def _skip_colors(file: BinaryIO, flags: bytes) -> None:
    if flags and flags[0] & 0x80:
        file.seek(3 << (1 + (flags[0] & 7)), 1)


def _skip_blocks(file: BinaryIO) -> None:
    while (size := file.read(1)) and size[0]:
        file.seek(size[0], 1)


_FORMATS: tuple[tuple[bytes, Callable[[BinaryIO], Iterator[float]]], ...] = (
    (b"RIFF", _webp),
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"GIF8", _gif),
)


def is_animation(start: bytes) -> bool:
    """Whether Pillow, and not a decoder of videos, reads a file that starts so."""
    is_webp = start.startswith(b"RIFF") and start[8:12] == b"WEBP"
    return is_webp or start.startswith((b"\x89PNG\r\n\x1a\n", b"GIF8"))
