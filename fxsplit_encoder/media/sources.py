"""Where media come from: files and encoded bytes, and limits before anything is decoded."""

from __future__ import annotations

import importlib
import io
import math
import os
import stat
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image

from fxsplit_encoder.errors import ConfigError, InputError, MediaError, MissingExtraError
from fxsplit_encoder.messages import shown


@dataclass(frozen=True)
class MediaSettings:
    """Limits of one item, by its header or its shape, and the background color."""

    max_bytes: int = 1 << 28
    """Of a file, of encoded bytes, or of an array."""

    max_pixels: int = 1 << 26
    """Of an image, or of one frame. Pillow has a limit of its own, `PIL.Image.MAX_IMAGE_PIXELS`."""

    max_frames: int = 1024
    """Frames of a video that have to be decoded: those that are sampled, and of an animated image those
    before them too."""

    max_seconds: float = 3600.0
    """Of a video or of audio."""

    max_tokens: int = 1 << 16
    """Rows of its feature, which grow with the options that enlarge it."""

    background: tuple[int, int, int] = (255, 255, 255)
    """Red, green and blue, 0 to 255, over which transparent images are composited; white, as in vLLM."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith("max_") and not value > 0:
                raise ConfigError(f"MediaSettings.{name}: expected a number above 0; got {value}")
        color: object = self.background
        levels = color if isinstance(color, tuple | list) and len(color) == 3 else [None]
        if not all(type(each) is int and 0 <= each <= 255 for each in levels):
            raise ConfigError(
                f"MediaSettings.background: expected red, green and blue from 0 to 255; got {shown(color)}"
            )

    def check(self, limit: str, value: float, what: str) -> None:
        """Raises MediaError for a value above the limit of that name; `what` is what the message calls it."""
        most = getattr(self, limit)
        if value > most:
            unit = limit.removeprefix("max_")
            raise MediaError(f"{what}: {value:g} {unit}; expected at most {most:g}, the limit {limit}")


Encoded = bytes | bytearray | memoryview
ARRAYS = np.ndarray | torch.Tensor


def is_encoded(media: object) -> bool:
    """Whether media is a file or its bytes, which have to be decoded."""
    return isinstance(media, str | os.PathLike | Encoded)


def read_source(media: object, limits: MediaSettings) -> object:
    """The bytes of a file, so that what is hashed and what is decoded are the same; anything else as it is.
    MediaError: no such file, not a regular one, or too large.
    """
    name = name_of(media)
    if isinstance(media, str | os.PathLike):
        with attempt(name), _checked_path(media, limits).open("rb") as file:
            media = file.read(limits.max_bytes + 1)  # it may have grown since it was looked at
    if isinstance(media, Encoded):
        limits.check("max_bytes", memoryview(media).nbytes, name)
    return media


def _checked_path(media: str | os.PathLike[str], limits: MediaSettings) -> Path:
    """The path of a regular file within the limit of bytes; raises MediaError where it is something else."""
    path = Path(media)
    if isinstance(media, str) and media.partition(":")[0] in ("http", "https", "data"):
        raise MediaError(f"{shown(media)}: expected a path; fetch what it names, and pass its bytes")
    with attempt(str(path)):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{path}: expected a regular file")
    limits.check("max_bytes", status.st_size, str(path))
    return path


_HEADER_READS = 1 << 16
_BYTES_PER_READ = 64
_HEADER_SECONDS = 10.0


class HeaderReader:
    """Encoded media as a file, of which no more is read than is asked for; MediaError: it cannot be opened,
    or before `unlimit` it takes more reads, or more seconds, than a header should.

    A format of many small parts is read in no fewer reads: half of them may have less than 64 bytes.
    """

    def __init__(self, media: Any, limits: MediaSettings) -> None:
        self.source: Path | bytes
        """The path, or the bytes."""
        if isinstance(media, str | os.PathLike):
            self.source = _checked_path(media, limits)
        else:
            self.source = bytes(media)
            limits.check("max_bytes", len(self.source), name_of(media))
        with attempt(name_of(media)):
            opened = self.source.open("rb") if isinstance(self.source, Path) else io.BytesIO(self.source)
        self._file: BinaryIO = opened
        size = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        self.tell, self.close = self._file.tell, self._file.close
        self._left: float = _HEADER_READS + size // _BYTES_PER_READ
        self._deadline = time.monotonic() + _HEADER_SECONDS

    def unlimit(self) -> None:
        """Read on without limits: the header has been read."""
        self._left = math.inf

    def read(self, size: int = -1, /) -> bytes:
        """So many bytes, or all that are left."""
        self._count()
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place, and return it."""
        self._count()
        return self._file.seek(offset, whence)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0 or (self._left % 256 == 0 and time.monotonic() > self._deadline):
            raise MediaError("its header has more parts than are read")


def name_of(media: object) -> str:
    """Returns the name of an image or of encoded media in messages."""
    if isinstance(media, str | os.PathLike):
        return str(media)
    return "image" if isinstance(media, Image.Image) else "encoded media"


def imported(module: str, libraries: str, purpose: str, extra: str) -> Any:
    """A module that decodes; MissingExtraError: it is not installed, MediaError: it finds no libraries."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(purpose, extra) from error
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MediaError(f"{module} cannot be loaded, which needs {libraries}: {reason}") from error


class attempt(AbstractContextManager[None]):
    """Turns whatever a decoder raises for bytes from outside into a MediaError that says what they are."""

    def __init__(self, what: str, kind: str = "media") -> None:
        self._what = what
        self._kind = kind

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, MemoryError | ImportError):
            return
        if isinstance(error, InputError):
            message = str(error)
            if isinstance(error, MediaError) and message.startswith(self._what):
                return
            raise MediaError(f"{self._what}: {message}") from error
        if isinstance(error, FileNotFoundError):
            raise MediaError(f"{self._what}: no such file") from error
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise MediaError(f"{self._what}: cannot be read as {self._kind}: {reason}") from error
