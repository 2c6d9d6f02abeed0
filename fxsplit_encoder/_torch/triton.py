"""Triton's driver and its cache of kernels. Imported only where Triton is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

__all__ = ["driver"]


def cached_files(kernel: Any) -> tuple[str, dict[str, bytes]]:
    """Returns the key of a compiled kernel in Triton's cache, and its files there by name."""
    return kernel.hash, {name: Path(path).read_bytes() for name, path in kernel.metadata_group.items()}


def restore_files(key: str, files: Mapping[str, bytes]) -> None:
    """Writes the files of a compiled kernel into Triton's cache."""
    manager = get_cache_manager(key)
    group = {name: manager.put(content, name, binary=True) for name, content in files.items()}
    metadata = next(name for name in files if name.endswith(".json"))
    manager.put_group(metadata, group)
