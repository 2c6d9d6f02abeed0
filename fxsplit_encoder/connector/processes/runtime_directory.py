"""A private directory for a socket, which nobody else can enter and which does not outlive its process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from fxsplit_encoder.connector.transport.private_directory import (
    default_root,
    private_directory,
    socket_path,
)

_NAME = "fxsplit-encoder"
_SETTING = "runtime_directory"


class RuntimeDirectory:
    """A new directory of mode 0700 inside one of this user's, locked for as long as this process lives.

    The lock tells others that its owner is alive, whatever process ids their container gives them. Those that
    nobody holds a lock on are left by processes that were killed, and are removed here.

    Args:
        root: in which this user's directory is made. None: `default_root()`.

    Raises:
        InputError: the root cannot be used, or what has the directory's name is not this user's alone.
    """

    def __init__(self, root: Path | None = None) -> None:
        base = private_directory((root or default_root()) / f"{_NAME}-{os.getuid()}", _SETTING)
        reap(base)
        self.path, self._lock = _new_locked(base)
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def socket_path(self, name: str) -> Path:
        """The path of a socket.

        Raises:
            InputError: it is longer than a socket's may be.
        """
        return socket_path(self.path, name, _SETTING)

    def close(self) -> None:
        """Remove it; idempotent."""
        self._finalizer()


def _new_locked(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(dir=base))
        lock = _lock(path)
        if lock is not None:
            return path, lock


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a directory; None: another holds it, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(path, follow_symlinks=False).st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def reap(base: Path) -> int:
    """Remove the directories of processes that are gone; returns how many."""
    count = 0
    for path in base.iterdir():
        lock = _lock(path)
        if lock is not None:
            _remove(path, lock, os.getpid())
            count += 1
    return count


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() != pid:  # a fork's copy: the directory is its parent's
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
