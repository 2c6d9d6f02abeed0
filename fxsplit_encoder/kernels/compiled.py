"""Compiled kernels as files, and back into the caches of their compilers: Triton's, that of `flash-attn-4`,
and that of cuDNN's plans, in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from fxsplit_encoder.kernels.attention.cudnn_files import captured_plans, restore_plans
from fxsplit_encoder.kernels.flash_cache import switch_on
from fxsplit_encoder.kernels.store import write_atomic

_TRITON_CODE = (
    "fxsplit_encoder.kernels.attention.triton_code",
    "fxsplit_encoder.compile.fingerprints_triton",
)
_FLASH_CACHE = "flash_attn.cute.cache_utils"


def compiled_kernels() -> dict[str, bytes]:
    """The files of the kernels, by a path of their own; none of a compiler that was not used."""
    return {**_triton_files(), **_flash_files(), **_plans()}


def restore_kernels(files: Mapping[str, bytes]) -> None:
    """Puts the files of `compiled_kernels` where the compilers look for them, before the first is launched;
    ValueError, and nothing written, for any other path.
    """
    groups: dict[str, dict[str, bytes]] = {}
    objects: dict[str, bytes] = {}
    plans: dict[str, bytes] = {}
    for name, content in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
            raise ValueError(f"{name}: no compiled kernel")
        compiler, *_ = path.parts
        if compiler == "triton" and len(path.parts) == 3:
            groups.setdefault(path.parts[1], {})[path.name] = content
        elif compiler == "cudnn" and len(path.parts) == 2:
            plans[path.name] = content
        elif compiler == "flash_attn_4" and len(path.parts) >= 3:
            objects[str(path.relative_to(compiler))] = content
        else:
            raise ValueError(f"{name}: no compiled kernel")
    restore_plans(plans)
    if groups and find_spec("triton") is not None:
        from fxsplit_encoder._torch.triton import restore_files

        for number, group in groups.items():
            restore_files(number, group)
    if objects and find_spec("flash_attn") is not None:
        _restore_flash(objects)


def _triton_files() -> dict[str, bytes]:
    modules = [module for name in _TRITON_CODE if (module := sys.modules.get(name)) is not None]
    if not modules:
        return {}
    from fxsplit_encoder._torch.triton import cached_files

    files = (cached_files(kernel) for module in modules for kernel in module.compiled_kernels())
    return {f"triton/{number}/{name}": content for number, group in files for name, content in group.items()}


def _flash_files() -> dict[str, bytes]:
    cache = sys.modules.get(_FLASH_CACHE)
    if cache is None or not cache.CUTE_DSL_CACHE_ENABLED:
        return {}
    root: Path = cache.get_cache_path()
    return {f"flash_attn_4/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("[!.]*.o")}


def _plans() -> dict[str, bytes]:
    return {f"cudnn/{name}": content for name, content in captured_plans().items()}


def _restore_flash(objects: Mapping[str, bytes]) -> None:
    if switch_on():
        return  # nobody would look there
    root: Path = import_module(_FLASH_CACHE).get_cache_path()
    for name, content in objects.items():
        path = root / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
