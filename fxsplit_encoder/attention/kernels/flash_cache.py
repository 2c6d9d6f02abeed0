"""The cache on disk of `flash-attn-4`, which the package leaves off unless its environment variable is set.

It is switched on here, in a directory of this library's own. The package names what it compiled by its own
sources and the versions of Python, CUTLASS and TVM FFI; the directory adds those of the other packages whose
code gets in. And what it would take for itself lies under the temporary directory that all users share, where
another could put code that is loaded.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from fxsplit_encoder.kernels.cache import cache_directory, why_not_private

SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
DIRECTORY = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

_MODULE = "flash_attn.cute.cache_utils"

_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")


def switch_on() -> str:
    """Has the package keep what it compiles on disk, for this process and those that it starts, before the
    package is imported. What the user set of its two variables stays.

    Returns:
        Why it is off; empty: it is on.
    """
    if (imported := sys.modules.get(_MODULE)) is not None:
        is_on = imported.CUTE_DSL_CACHE_ENABLED
        return "" if is_on else "flash-attn-4 was imported before with its cache off"
    if SWITCH in os.environ:
        return "" if os.environ[SWITCH] == "1" else f"{SWITCH} is not 1"
    if find_spec("flash_attn") is None:
        return "flash-attn-4 is not installed"
    if DIRECTORY not in os.environ:
        directory = own_directory("flash_attn_4")
        if problem := problem_of(directory):
            return f"{directory}: {problem}"
        os.environ[DIRECTORY] = str(directory)
    os.environ[SWITCH] = "1"
    return ""


def own_directory(name: str) -> Path:
    """Where variants of a package are kept for these versions of all, if the user names no directory."""
    versions = "\n".join(f"{package} {_version(package)}" for package in _PACKAGES)
    return cache_directory() / name / hashlib.sha256(versions.encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def problem_of(directory: Path) -> str:
    """Why the package should not use a directory; empty: it may. It locks files there, and where it cannot,
    its calls fail.
    """
    if problem := why_not_private(directory):
        return problem
    try:
        import fcntl

        with tempfile.TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ImportError) as error:
        return str(error)
    return ""
