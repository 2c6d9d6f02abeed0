"""Switches on the disk cache of `flash-attn-4`, in a private directory of this library. The package's own
lies in a temporary directory where others could put code; ours adds the versions of packages whose code
gets in.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from fxsplit_encoder.kernels.store import cache_directory, why_not_private

SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
DIRECTORY = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

_MODULE = "flash_attn.cute.cache_utils"

_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")


def switch_on() -> str:
    """Has the package keep what it compiles on disk, for this process and its children, before it is
    imported. The user's values of its two variables stay. Returns why it is off; empty: it is on.
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
    """Why the package, which locks files there, should not use a directory; empty: it may."""
    if problem := why_not_private(directory):
        return problem
    try:
        import fcntl

        with tempfile.TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ImportError) as error:
        return str(error)
    return ""
