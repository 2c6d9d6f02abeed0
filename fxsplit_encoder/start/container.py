"""The file of a saved start: one line that says what it is and its digest, then a zip of named parts.

Nothing of it is looked at before the digest is right, and it is written as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from fxsplit_encoder.errors import InputError, StartFileError

_MAGIC = b"fxsplit_encoder start "

FORMAT = 2
"""Changes when what is in the file does."""

_LONGEST_LINE = 200


def write_parts(path: Path, parts: Mapping[str, bytes]) -> int:
    """Replaces the file by one with these parts; how many bytes it has.

    Raises:
        InputError: it cannot be written; what was there is still there.
    """
    payload = io.BytesIO()
    with zipfile.ZipFile(payload, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    body = payload.getvalue()
    line = b"%s%d %d %s\n" % (_MAGIC, FORMAT, len(body), hashlib.sha256(body).hexdigest().encode())
    written = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            written = file.name
            file.write(line)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(written, 0o644)  # a temporary file is its owner's alone; a start is for others
        os.replace(written, path)
    except OSError as error:
        if written is not None and os.path.exists(written):
            os.unlink(written)
        raise InputError(f"{path}: the start cannot be written: {error}") from error
    return len(line) + len(body)


def read_parts(path: Path) -> dict[str, bytes]:
    """The parts of a file, whole and undamaged.

    Raises:
        StartFileError: there is none, it is of another format, cut short or damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StartFileError(f"file: expected a saved start; got {type(error).__name__}: {error}") from error
    line, newline, body = content.partition(b"\n")
    words = line[:_LONGEST_LINE].removeprefix(_MAGIC).split(b" ")
    if not (line.startswith(_MAGIC) and newline and len(words) == 3 and words[0].isdigit()):
        raise StartFileError(f"file: expected one that save_start wrote; got {len(content)} bytes of another")
    if int(words[0]) != FORMAT:
        raise StartFileError(f"format: expected {FORMAT}; got {int(words[0])}")
    if not words[1].isdigit() or int(words[1]) != len(body):
        raise StartFileError(f"length: expected {words[1].decode('latin-1')} bytes; got {len(body)}")
    digest = hashlib.sha256(body).hexdigest()
    if digest.encode() != words[2]:
        raise StartFileError(f"digest: expected {words[2].decode('latin-1')}; got {digest}")
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
