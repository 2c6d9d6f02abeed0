"""Saves what was compiled, measured and chosen for a tower to a file, with which other processes start; what
was measured of captures stays on the machine, too.

The file is one line with its digest, one with the sizes of its named parts, then these, compressed. It is
used only where the device, the versions of everything that compiles or is measured, the tower and its
configuration are the same; all of it is checked before any of it is used.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import pickle
import platform
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.compiler
from pydantic import ConfigDict, TypeAdapter

from fxsplit_encoder.errors import CompileError, InputError, StartFileError
from fxsplit_encoder.kernels.choice import KernelMeasurements
from fxsplit_encoder.kernels.compiled import compiled_kernels, restore_kernels
from fxsplit_encoder.kernels.store import (
    KernelStore,
    check_trusted,
    describe_environment,
    digest_of,
    entries_of,
    package_version,
    sealed,
    table_of,
    unsealed,
    write_atomic,
)
from fxsplit_encoder.manager.tower import named_tensors, tower_part
from fxsplit_encoder.runtime.measure import KnownCosts
from fxsplit_encoder.version import VERSION

if TYPE_CHECKING:
    from fxsplit_encoder.manager.generation import Generation

logger = logging.getLogger(__name__)

Key = dict[str, Any]
"""Plain values by dotted names; two are compared name by name."""

Measurements = Sequence[KernelMeasurements[Any, Any]]
"""Of every operation that has several kernels."""

Content = TypeVar("Content")

_PACKAGE = Path(__file__).resolve().parents[1]

# Settings that change nothing of what is compiled, measured or chosen.
_IGNORED_SETTINGS = {"start_file", "debug", "capture_recurring", "weight_check_seconds"}

# What torch may raise of the bytes of another process.
_OF_LOADING = (
    *(pickle.PickleError, AssertionError, AttributeError, EOFError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)

_MOST_BYTES = 1 << 33

# The parts of a file.
_ENVIRONMENT, _TOWER, _COMPILED = "environment.json", "tower.json", "torch.bin"
_KERNELS, _MEASURED = "kernels/", "measured/"


@dataclass(frozen=True)
class KnownTower:
    """Measurements and programs of one tower under one configuration."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: Key
    """See `tower_key`."""
    paths: Mapping[str, KnownCosts]
    """By the label of a path."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """The traced programs that can be saved, pickled, by the label of a path."""


_KNOWN_TOWER = TypeAdapter(KnownTower)


# --- of a manager


def save_start(
    generation: Generation, measurements: Measurements, path: Path, *, is_measured: bool = True
) -> tuple[int, dict[str, str]]:
    """Writes what was compiled and, if `is_measured`, measured; returns the bytes of the file and, by the
    labels of paths, why compiled programs are not in it. InputError: it cannot be written.
    """
    from fxsplit_encoder.compile.saved import save_program

    paths = generation.paths_by_key.values()
    programs: dict[str, str] = {}
    unsaved: dict[str, str] = {}
    for each in paths:
        if each.program is None:  # it is captured as it is
            continue
        try:
            programs[each.label] = save_program(each.program, named_tensors(each.tower))
        except CompileError as error:
            unsaved[each.label] = str(error)
    known = {each.label: each.known() for each in paths} if is_measured else {}
    device = generation.pool.device
    compiled = torch.compiler.save_cache_artifacts()
    parts = {
        _ENVIRONMENT: _to_json(environment_key(device, measurements)),
        _TOWER: _to_json(asdict(KnownTower(tower_key(generation), known, programs))),
        **{_part_of(each): _to_json(entries_of(each.table(device))) for each in measurements},
        **{f"{_KERNELS}{name}": content for name, content in compiled_kernels(device).items()},
    }
    if compiled is not None:
        parts[_COMPILED] = compiled[0]
    return write_parts(path, parts), unsaved


def load_start(
    generation: Generation, measurements: Measurements, path: Path, *, is_measured: bool = True
) -> None:
    """Uses a file of `save_start`, or none of it; StartFileError: it is damaged, or for something else."""
    device, paths = generation.pool.device, generation.paths_by_key.values()
    parts = read_parts(path)
    environment: Key = _part(parts, _ENVIRONMENT, dict)
    if different := differences(environment_key(device, measurements), environment):
        raise StartFileError(*different)
    tower = _part(parts, _TOWER, _KNOWN_TOWER.validate_python)
    if different := differences(tower_key(generation), tower.key):
        raise StartFileError(*different)
    tables = [
        _part(parts, _part_of(each), functools.partial(table_of, shape=each.shape, device=device))
        for each in measurements
    ]
    if is_measured and (missing := [each.label for each in paths if each.label not in tower.paths]):
        raise StartFileError(f"{missing[0]}: expected what was measured of it; got nothing")
    _use_compiled(parts, device)
    for each, table in zip(measurements, tables, strict=True):
        each.add(device, table)
    for encoder_path in paths:
        if is_measured:
            encoder_path.expect(tower.paths[encoder_path.label])
        encoder_path.saved = tower.programs.get(encoder_path.label)
        encoder_path.options = replace(encoder_path.options, is_known=True)


# --- costs that stay on this machine


def keep_costs(generation: Generation, measurements: Measurements) -> None:
    """Writes the measured times of the paths to the cache directory of kernel measurements, so that the next
    start makes the same plans without timing captures again.
    """
    store, name, key = _costs_of(generation, measurements)
    known = KnownTower(key, {path.label: path.known() for path in generation.paths_by_key.values()})
    try:
        store.write(name, _to_json(asdict(known)))
    except OSError as error:
        logger.warning("the next start measures captures again: %s", error)


def expect_costs(generation: Generation, measurements: Measurements) -> bool:
    """Uses what an earlier start of the same tower kept; returns whether there is any."""
    store, name, key = _costs_of(generation, measurements)
    content = store.read(name)
    try:
        tower = None if content is None else tower_from_json(content)
    except ValueError as error:
        logger.warning("captures are measured again: %s", error)
        return False
    paths = generation.paths_by_key.values()
    if tower is None or tower.key != key or any(path.label not in tower.paths for path in paths):
        return False
    for path in paths:
        path.expect(tower.paths[path.label])
    return True


def _costs_of(generation: Generation, measurements: Measurements) -> tuple[KernelStore, str, Key]:
    key = tower_key(generation)
    store = KernelStore("costs", environment_key(generation.pool.device, measurements))
    return store, f"{digest_of(key)}.json", key


def _to_json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


def _part_of(measurements: KernelMeasurements[Any, Any]) -> str:
    return f"{_MEASURED}{measurements.shape.operation}.json"


def _part(parts: Mapping[str, bytes], name: str, read: Callable[[Any], Content]) -> Content:
    if name not in parts:
        raise StartFileError(f"{name}: expected in every saved start; got none")
    try:
        return read(json.loads(parts[name]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StartFileError(f"{name}: expected what a start holds there; got {error!r}") from error


def _use_compiled(parts: Mapping[str, bytes], device: torch.device) -> None:
    """Passes compiled code to torch and Triton; StartFileError: one of them refuses it."""
    if (compiled := parts.get(_COMPILED)) is not None:
        problem, loaded = "", None
        try:
            loaded = torch.compiler.load_cache_artifacts(compiled)
        except _OF_LOADING as error:
            problem = f" ({type(error).__name__}: {error})"
        if loaded is None:
            raise StartFileError(
                f"{_COMPILED}: expected graphs that torch compiled; got {len(compiled)} bytes{problem}"
            )
    kernels = {name.removeprefix(_KERNELS): part for name, part in parts.items() if name.startswith(_KERNELS)}
    try:
        restore_kernels(kernels, device)
    except (OSError, ValueError) as error:
        raise StartFileError(f"kernels: expected compiled kernels; got {error}") from error


# --- what a file holds for


def environment_key(device: torch.device, measurements: Iterable[KernelMeasurements[Any, Any]] = ()) -> Key:
    """Returns the versions and device properties that a start file has to match."""
    key: Key = {
        "fxsplit_encoder": VERSION,
        "fxsplit_encoder.code": _own_code(),
        "python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
    }
    if device.type == "cuda":
        key["gpu.capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        measured_with = describe_environment(device)
        key["measured_with"] = {name: value for name, value in measured_with.items() if name != "gpu"}
        key |= {f"{each.shape.operation}.kernels": [k.name for k in each.kernels] for each in measurements}
        key["gpu"] = measured_with["gpu"]
    else:
        key["gpu"] = None
        key["cpu"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return plain(key)


def tower_key(generation: Generation) -> Key:
    """Returns the tower and its settings, which a start must have been made for."""
    tower, limits = generation.spec.tower, generation.spec.limits
    settings = generation.config.model_dump(mode="json", exclude=_IGNORED_SETTINGS, fallback=_name_of)
    return plain(
        {
            "tower": _name(type(tower)),
            "tower.modules": _structure(tower),
            "dtype": str(generation.spec.dtype),
            "paths": {each.label: list(each.budgets) for each in generation.paths_by_key.values()},
            "items": limits.max_items_per_batch,
            "frames": limits.max_frames_per_batch,
            "settings": settings,
        }
    )


def plain(key: Mapping[str, Any]) -> Key:
    """Converts a key as JSON does, nested mappings to dotted names."""
    flat: Key = {}
    for name, value in json.loads(json.dumps(key)).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": each for inner, each in plain(value).items()}
        else:
            flat[name] = value
    return flat


def differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """Returns a line for each name whose values differ between this process and a file."""
    names = dict.fromkeys((*expected, *got))
    return [
        f"{name}: expected {_shown(expected, name)}; got {_shown(got, name)}"
        for name in names
        if (name in expected) != (name in got) or expected.get(name) != got.get(name)
    ]


def _shown(key: Mapping[str, Any], name: str) -> str:
    return json.dumps(key[name]) if name in key else "nothing"


@functools.cache
def _own_code() -> str:
    # The version does not change with every commit.
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _structure(tower: object) -> str | None:
    """Digest of the modules, parameters and buffers, without values; None for no module."""
    part = tower_part(tower)
    if part is None:
        return None
    lines = [f"{name} {_name(type(module))}" for name, module in part.named_modules()]
    tensors = (*part.named_parameters(), *part.named_buffers())
    lines += [f"{name} {tuple(each.shape)} {each.stride()} {each.dtype}" for name, each in tensors]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _name_of(value: object) -> str:
    return str(getattr(value, "__qualname__", repr(type(value))))


# --- the file


def write_parts(path: Path, parts: Mapping[str, bytes]) -> int:
    """Replaces the file by one with these parts; returns its bytes. InputError: it cannot be written."""
    sizes = {name: len(content) for name, content in parts.items()}
    content = sealed(json.dumps(sizes).encode() + b"\n" + zlib.compress(b"".join(parts.values()), 1))
    try:
        write_atomic(path, content, durable=True)
    except OSError as error:
        raise InputError(f"{path}: the start cannot be written: {error}") from error
    return len(content)


def read_parts(path: Path) -> dict[str, bytes]:
    """Reads a file that no other user can write; StartFileError: there is none, others can write it, or it is
    damaged, forged or too large.
    """
    try:
        check_trusted(path)  # it holds code
        content = path.read_bytes()
    except OSError as error:
        raise StartFileError(f"file: expected a saved start; got {type(error).__name__}: {error}") from error
    if (body := unsealed(content)) is None:
        raise StartFileError(
            f"file: expected one that save_start wrote, undamaged; got {len(content)} bytes of another digest"
        )
    try:
        index, _, packed = body.partition(b"\n")
        sizes: dict[str, int] = json.loads(index)
        *starts, size = itertools.accumulate(sizes.values(), initial=0)
        if not 0 <= size <= _MOST_BYTES or min(sizes.values(), default=0) < 0:
            raise ValueError(f"{len(sizes)} parts of {size} bytes")
        joined = zlib.decompressobj().decompress(packed, size + 1)  # no more than the first line says
        if len(joined) != size:
            raise ValueError(f"other than {size} bytes")
        return {name: joined[at : at + sizes[name]] for name, at in zip(sizes, starts, strict=True)}
    except (zlib.error, AttributeError, RecursionError, TypeError, ValueError) as error:
        raise StartFileError(f"file: expected named parts; got {type(error).__name__}: {error}") from error


def tower_from_json(content: bytes) -> KnownTower:
    """Decodes the tower of a part of a file; ValueError: it holds something else."""
    return _KNOWN_TOWER.validate_python(json.loads(content))
