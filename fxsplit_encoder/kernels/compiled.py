"""Collect the compiled kernels of this process for a start file, and put them back into compilers' caches."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from fxsplit_encoder.kernels.attention.cudnn_varlen import PLAN_FILES
from fxsplit_encoder.kernels.compile_jobs import (
    FLASH_CACHE,
    QUACK_CACHE,
    QUACK_DIRECTORY,
    keep_flash_attention,
    name_quack_directory,
    package_store,
)
from fxsplit_encoder.kernels.store import write_atomic

_TRITON_CODE = (
    "fxsplit_encoder.kernels.attention.triton_code",
    "fxsplit_encoder.compile.fingerprints_triton",
)


def compiled_kernels(device: torch.device) -> dict[str, bytes]:
    """The files of the kernels, by the compiler's name and a path; none of a compiler that was not used."""
    groups = {
        "triton": _triton_files(),
        "flash_attn_4": _flash_files(),
        "cudnn": PLAN_FILES.captured(device),
        "quack": _quack_files(),
    }
    return {f"{name}/{path}": content for name, files in groups.items() for path, content in files.items()}


def restore_kernels(files: Mapping[str, bytes], device: torch.device) -> None:
    """Writes the files of `compiled_kernels` to the caches; ValueError for another path, before any write."""
    groups: dict[str, dict[str, bytes]] = {"triton": {}, "flash_attn_4": {}, "cudnn": {}, "quack": {}}
    for name, content in files.items():
        compiler, _, path = name.partition("/")
        if compiler not in groups or path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise ValueError(f"{name}: no compiled kernel")
        groups[compiler][path] = content
    _restore_quack(groups["quack"])
    PLAN_FILES.restore(groups["cudnn"], device)
    _restore_triton(groups["triton"])
    _restore_flash(groups["flash_attn_4"])


def _triton_files() -> dict[str, bytes]:
    modules = [module for name in _TRITON_CODE if (module := sys.modules.get(name)) is not None]
    if not modules:
        return {}
    from fxsplit_encoder._torch.triton import cached_files

    files = (cached_files(kernel) for module in modules for kernel in module.compiled_kernels())
    return {f"{number}/{name}": content for number, group in files for name, content in group.items()}


def _restore_triton(files: Mapping[str, bytes]) -> None:
    if not files or find_spec("triton") is None:
        return
    from fxsplit_encoder._torch.triton import restore_files

    groups: dict[str, dict[str, bytes]] = {}
    for path, content in files.items():
        number, _, name = path.partition("/")
        groups.setdefault(number, {})[name] = content
    for number, group in groups.items():
        restore_files(number, group)


def _flash_files() -> dict[str, bytes]:
    cache = sys.modules.get(FLASH_CACHE)
    return _objects(cache.get_cache_path()) if cache is not None and cache.CUTE_DSL_CACHE_ENABLED else {}


def _restore_flash(objects: Mapping[str, bytes]) -> None:
    if objects and find_spec("flash_attn") is not None and keep_flash_attention():
        _write_objects(import_module(FLASH_CACHE).get_cache_path(), objects)


def _quack_files() -> dict[str, bytes]:
    cache: Any = sys.modules.get(QUACK_CACHE)
    root = package_store("quack").directory
    is_used = cache is not None and cache.CACHE_ENABLED and str(root) == cache.CACHE_DIR
    return _objects(root) if is_used else {}


def _restore_quack(objects: Mapping[str, bytes]) -> None:
    if not objects or find_spec("quack") is None:
        return
    name_quack_directory()
    root = package_store("quack").directory
    if Path(os.environ.get(QUACK_DIRECTORY, "")) == root:  # else the user named it
        _write_objects(root, objects)


def _objects(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("[!.]*.o")}


def _write_objects(root: Path, objects: Mapping[str, bytes]) -> None:
    for name, content in objects.items():
        path = root / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
