"""Where QuACK keeps what it compiled, and how it compiles without a device.

It takes a directory under the temporary one, which all users share, unless a variable names another: it gets
one of this library's own. It names what it compiled by its own sources and the versions of Python, CUTLASS
and TVM FFI.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from fxsplit_encoder.kernels.flash_cache import own_directory, problem_of
from fxsplit_encoder.kernels.store import write_atomic

DIRECTORY = "QUACK_CACHE_DIR"
_CACHE = "quack.cache"
_HOST = "quack.gemm_runtime.host"


def name_directory() -> None:
    """Has the package, and processes that are started, use a directory of this library's own, where it was
    not imported before and the user named none.
    """
    if DIRECTORY not in os.environ and _CACHE not in sys.modules:
        directory = own_directory("quack")
        if not problem_of(directory):
            os.environ[DIRECTORY] = str(directory)


def compiled_files() -> dict[str, bytes]:
    """What is kept in a directory of this library's own, by the path in it; nothing if that is not in use."""
    cache: Any = sys.modules.get(_CACHE)
    root = own_directory("quack")
    if cache is None or not cache.CACHE_ENABLED or cache.CACHE_DIR != str(root):
        return {}
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("[!.]*.o")}


def restore_files(files: Mapping[str, bytes]) -> None:
    """Puts `compiled_files` where the package will look for them.

    Raises:
        ValueError: a path is none of those. Nothing was written then.
    """
    for name in files:
        given = PurePosixPath(name)
        if given.is_absolute() or ".." in given.parts or given.suffix != ".o":
            raise ValueError(f"{name}: no compiled kernel of QuACK")
    if not files or find_spec("quack") is None:
        return
    name_directory()
    root = Path(os.environ.get(DIRECTORY, ""))
    if root != own_directory("quack"):
        return  # another directory is the user's
    for name, content in files.items():
        path = root / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)


class _Compiled(Exception):
    """What was to be compiled is on disk."""


@contextlib.contextmanager
def compiling_alone() -> Iterator[None]:
    """Within, a call ends as soon as its kernel is compiled: the package asks the device next how many of its
    clusters fit.

    Raises:
        RuntimeError: the call did not come that far.
    """
    host = import_module(_HOST)

    def stop(*_: Any) -> None:
        raise _Compiled

    asked = host.get_max_active_clusters
    host.get_max_active_clusters = stop  # type: ignore[attr-defined]
    try:
        yield
    except _Compiled:
        return
    finally:
        host.get_max_active_clusters = asked  # type: ignore[attr-defined]
    raise RuntimeError("QuACK was called and did not ask for the device: nothing is known to be compiled")
