"""A private directory for a socket, which nobody else can enter and which does not outlive its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

from fxsplit_encoder.errors import InputError

_NAME = "fxsplit-encoder"
_MOST_SOCKET_PATH = 100
"""Linux has room for 107 characters."""


def default_root() -> Path:
    """`$XDG_RUNTIME_DIR`, where there is one; else the directory of temporary files."""
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(root if root and os.access(root, os.W_OK | os.X_OK) else tempfile.gettempdir())


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
        base = _own_directory(root or default_root())
        reap(base)
        self.path, self._lock = _new_locked(base)
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def socket_path(self, name: str) -> Path:
        """The path of a socket.

        Raises:
            InputError: it is longer than a socket's may be.
        """
        path = self.path / name
        if len(os.fsencode(path)) > _MOST_SOCKET_PATH:
            raise InputError(
                f"runtime_directory: {path} is too long for a socket; name a directory with a shorter path"
            )
        return path

    def close(self) -> None:
        """Remove it; idempotent."""
        self._finalizer()


def _own_directory(root: Path) -> Path:
    base = root / f"{_NAME}-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            base.mkdir(mode=0o700)
        state = base.lstat()
    except OSError as error:
        raise InputError(f"runtime_directory: {base} cannot be made: {error}") from error
    # Whoever may write to the root may have made it first, to read along or to lead elsewhere.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise InputError(
            f"runtime_directory: expected {base} to be a directory of this user alone (mode 0700); "
            "remove it, or name another root"
        )
    return base


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
