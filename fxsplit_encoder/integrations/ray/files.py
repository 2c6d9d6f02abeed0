"""Image files by their paths or URIs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyarrow import fs

from fxsplit_encoder.errors import InputError

EXTENSIONS = (".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of the files that are taken from directories."""


def read_file(path: str) -> bytes:
    """The contents of a file.

    Raises:
        OSError: it cannot be read.
    """
    if "://" not in path:
        return Path(path).read_bytes()
    filesystem, inside = fs.FileSystem.from_uri(path)
    with filesystem.open_input_stream(inside) as stream:
        data: bytes = stream.read()
    return data


def list_files(paths: Sequence[str]) -> list[str]:
    """The files among the paths as they are given, and the images in directories, at any depth and in order
    of name.

    Args:
        paths: files and directories, or URIs such as s3://bucket/images.

    Raises:
        InputError: a path does not exist, or a directory holds no image.
    """
    found: list[str] = []
    for path in paths:
        inside = list(_in_uri(path) if "://" in path else _in_directory(path))
        if not inside:
            raise InputError(f"{path}: no image in this directory; expected {', '.join(EXTENSIONS)}")
        found += inside
    return found


def _in_directory(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    if not os.path.isdir(path):
        raise InputError(f"{path}: no such file or directory")
    for directory, below, names in os.walk(path):
        below.sort()
        yield from (os.path.join(directory, name) for name in sorted(names) if _is_image(name))


def _in_uri(uri: str) -> Iterator[str]:
    try:
        filesystem, inside = fs.FileSystem.from_uri(uri)
        (info,) = filesystem.get_file_info([inside])
        if info.type == fs.FileType.File:
            yield uri
            return
        below = filesystem.get_file_info(fs.FileSelector(inside, recursive=True))
    except (OSError, ValueError) as error:
        raise InputError(f"{uri}: cannot be listed: {error}") from None
    scheme = uri.partition("://")[0]
    names = sorted(file.path for file in below if file.type == fs.FileType.File and _is_image(file.path))
    yield from (f"{scheme}://{name}" for name in names)


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)
