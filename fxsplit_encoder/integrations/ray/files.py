"""Image files by their paths or URIs, and digests that tell the inputs of runs apart."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pyarrow import fs

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.checkpoint import Checkpoint

EXTENSIONS = (".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of the files that are taken from directories."""


def read_file(path: str) -> bytes:
    """The contents of a file; raises OSError where it cannot be read."""
    if "://" not in path:
        return Path(path).read_bytes()
    filesystem, inside = fs.FileSystem.from_uri(path)
    with filesystem.open_input_stream(inside) as stream:
        data: bytes = stream.read()
    return data


def list_files(paths: Sequence[str]) -> list[str]:
    """The files among the paths as they are given, and the images in directories, at any depth and in order
    of name.

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


_SETTINGS = ("config.json", "processor_config.json", "preprocessor_config.json")


def paths_digest(paths: Iterable[str]) -> str:
    """Of a list of files, by their names."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def checkpoint_digest(model: str) -> str:
    """Of a checkpoint: of one on the hub by its revision, of a directory by what its settings hold, and the
    sizes and times of its weights.
    """
    checkpoint = Checkpoint.locate(model)
    digest = hashlib.sha256()
    for name in _SETTINGS:
        found = checkpoint.find(name)
        digest.update(b"" if found is None else found.read_bytes())
        if found is not None and checkpoint.directory is None:
            digest.update(found.parent.name.encode())
    if checkpoint.directory is not None:
        for weights in sorted(checkpoint.directory.glob("*.safetensors")):
            state = weights.stat()
            digest.update(f"{weights.name} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()
