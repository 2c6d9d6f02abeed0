"""Triton's driver, for launching a kernel that was compiled before, and its cache of compiled kernels.
Imported only where Triton is installed.

`kernel[grid](...)`, the public way, looks for the compiled version of a kernel at each call, which takes it
longer than the launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

__all__ = ["cached_files", "driver", "restore_files"]


def cached_files(kernel: Any) -> tuple[str, dict[str, bytes]]:
    """The key of a compiled kernel in Triton's cache, and its files there by name."""
    return kernel.hash, {name: Path(path).read_bytes() for name, path in kernel.metadata_group.items()}


def restore_files(key: str, files: Mapping[str, bytes]) -> None:
    """Puts the files of a compiled kernel into Triton's cache, each written as a whole."""
    manager = get_cache_manager(key)
    group = {name: manager.put(content, name, binary=True) for name, content in files.items()}
    metadata = next(name for name in files if name.endswith(".json"))
    manager.put_group(metadata, group)
