"""Directories that belong to one user alone, for sockets."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from fxsplit_encoder.errors import InputError

_MOST_SOCKET_PATH = 100
"""Linux has room for 107 characters."""


def default_root() -> Path:
    """`$XDG_RUNTIME_DIR`, where there is one; else the directory of temporary files."""
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(root if root and os.access(root, os.W_OK | os.X_OK) else tempfile.gettempdir())


def private_directory(path: Path, setting: str) -> Path:
    """Make a directory of mode 0700, or take one that is there.

    Args:
        path: its path; what it lies in has to be there.
        setting: what messages call it.

    Raises:
        InputError: it cannot be made, or what has its name is not this user's alone.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        state = path.lstat()
    except OSError as error:
        raise InputError(f"{setting}: {path} cannot be made: {error}") from error
    # Whoever may write to what it lies in may have made it first, to read along or to lead elsewhere.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise InputError(
            f"{setting}: expected {path} to be a directory of this user alone (mode 0700); "
            "remove it, or name another"
        )
    return path


def socket_path(directory: Path, name: str, setting: str) -> Path:
    """The path of a socket in a directory.

    Args:
        directory: which it lies in.
        name: of the socket.
        setting: what messages call the directory.

    Raises:
        InputError: it is longer than a socket's may be.
    """
    path = directory / name
    if len(os.fsencode(path)) > _MOST_SOCKET_PATH:
        raise InputError(f"{setting}: {path} is too long for a socket; name a directory with a shorter path")
    return path
