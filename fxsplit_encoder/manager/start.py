"""A start on disk: what was compiled, measured and chosen for a tower, for other processes.

The file is one line with its length and digest, then a zip of named parts. It is replaced as a whole, and
nothing of it is read before the digest is right. It is used only where the device, the versions of everything
that compiles or is measured, the tower and its configuration are the same; everything is checked before
anything is used.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import platform
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.compiler
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fxsplit_encoder.errors import CompileError, InputError, StartFileError
from fxsplit_encoder.kernels import KernelMeasurements, Measured, describe_environment
from fxsplit_encoder.kernels.compiled import compiled_kernels, restore_kernels
from fxsplit_encoder.kernels.kernel import ShapeT
from fxsplit_encoder.kernels.store import check_trusted, entries_of, table_of, write_atomic
from fxsplit_encoder.manager.tower import tower_part
from fxsplit_encoder.runtime import KnownCosts
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
_IGNORED_SETTINGS = ("start_file", "debug", "capture_recurring", "weight_check_seconds")

FORMAT = 2
"""Changes when what is in the file does."""

_MAGIC = b"fxsplit_encoder start "
_LONGEST_LINE = 200

# What zipfile raises of an archive that was forged.
_OF_ARCHIVES = (
    *(EOFError, LookupError, NotImplementedError, OSError, OverflowError, RuntimeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
_MOST_BYTES = 1 << 33

# The parts of a file.
_ENVIRONMENT, _TOWERS, _COMPILED = "environment.json", "towers.json", "torch.bin"
_KERNELS, _MEASURED = "kernels/", "measured/"


@dataclass(frozen=True)
class KnownTower:
    """Measurements and programs of one tower under one configuration."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: Key
    """What tells it from others: see `tower_key`."""
    paths: Mapping[str, KnownCosts]
    """By the label of a path."""
    programs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The traced programs, by the label of a path; without those that cannot be saved."""


_KNOWN_TOWERS = TypeAdapter(list[KnownTower])


# --- of a manager


def save_captured(generation: Generation, measurements: Measurements, path: Path) -> int:
    """Writes what was compiled, measured and chosen for captures; returns the bytes of the file.

    Raises:
        InputError: the file cannot be written.
    """
    paths = {each.label: each.known() for each in generation.paths_by_key.values()}
    programs = {}
    for each in generation.paths_by_key.values():
        if each.program is None:  # it is captured as it is
            continue
        try:
            programs[each.label] = each.forward.to_save()
        except CompileError as error:
            logger.warning("%s: a start from %s will trace it again: %s", each.label, path, error)
    return _save(path, generation, measurements, KnownTower(tower_key(generation), paths, programs))


def save_programs(
    generation: Generation, measurements: Measurements, programs: Mapping[str, dict[str, Any]], path: Path
) -> None:
    """Writes programs alone, by the labels of their paths, before anything was measured."""
    _save(path, generation, measurements, KnownTower(tower_key(generation), {}, programs))


def load_captured(generation: Generation, measurements: Measurements, path: Path) -> None:
    """Uses the measurements and programs of a file for the captures to come.

    Raises:
        StartFileError: it is damaged, or was made for something else. Nothing of it is used then.
    """
    start = _read(path, generation, measurements)
    paths = list(generation.paths_by_key.values())
    for each in paths:
        if each.label not in start.tower.paths:
            raise StartFileError(f"{each.label}: expected what was measured of it; got nothing")
    start.hand_over()
    for each in paths:
        each.expect(start.tower.paths[each.label])
    _use_programs(generation, start.tower)


def load_programs(generation: Generation, measurements: Measurements, path: Path) -> None:
    """Restores forwards from what `save_programs` wrote.

    Raises:
        StartFileError: as of `load_captured`.
    """
    start = _read(path, generation, measurements)
    start.hand_over()
    _use_programs(generation, start.tower)


def _use_programs(generation: Generation, tower: KnownTower) -> None:
    for each in generation.paths_by_key.values():
        each.forward.saved = tower.programs.get(each.label)
        each.forward.options = replace(each.forward.options, is_known=True)


def _save(path: Path, generation: Generation, measurements: Measurements, tower: KnownTower) -> int:
    device = generation.pool.device
    compiled = torch.compiler.save_cache_artifacts()
    parts = {
        _ENVIRONMENT: json.dumps(environment_key(device, measurements), indent=1).encode(),
        _TOWERS: towers_to_json([tower]),
        **{_part_of(each): table_to_json(each.table(device)) for each in measurements},
        **{f"{_KERNELS}{name}": content for name, content in compiled_kernels().items()},
    }
    if compiled is not None:
        parts[_COMPILED] = compiled[0]
    return write_parts(path, parts)


def _read(path: Path, generation: Generation, measurements: Measurements) -> _ReadStart:
    """Reads and checks all of a file.

    Raises:
        StartFileError: it is damaged, or was made for something else.
    """
    device = generation.pool.device
    parts = read_parts(path)
    environment = _part(parts, _ENVIRONMENT, lambda content: dict(json.loads(content)))
    if different := differences(environment_key(device, measurements), environment):
        raise StartFileError(*different)
    tower = _the_one_of(tower_key(generation), _part(parts, _TOWERS, towers_from_json))
    tables = [
        (
            each,
            _part(parts, _part_of(each), functools.partial(table_from_json, shape=each.shape, device=device)),
        )
        for each in measurements
    ]
    kernels = {name.removeprefix(_KERNELS): part for name, part in parts.items() if name.startswith(_KERNELS)}
    return _ReadStart(tower, tables, device, parts.get(_COMPILED), kernels)


def _part_of(measurements: KernelMeasurements[Any, Any]) -> str:
    return f"{_MEASURED}{measurements.shape.operation}.json"


def _part(parts: Mapping[str, bytes], name: str, read: Callable[[bytes], Content]) -> Content:
    if name not in parts:
        raise StartFileError(f"{name}: expected in every saved start; got none")
    try:
        return read(parts[name])
    except (ValueError, TypeError) as error:
        if isinstance(error, StartFileError):
            raise
        raise StartFileError(f"{name}: expected JSON of a saved start; got {error}") from error


def _the_one_of(key: Key, towers: Sequence[KnownTower]) -> KnownTower:
    """The tower of a key.

    Raises:
        StartFileError: there is none; how the one that is most like it differs.
    """
    if not towers:
        raise StartFileError("towers: expected at least one; got none")
    by_difference = sorted(
        ((differences(key, tower.key), tower) for tower in towers), key=lambda e: len(e[0])
    )
    different, tower = by_difference[0]
    if different:
        raise StartFileError(*different)
    return tower


@dataclass(frozen=True)
class _ReadStart:
    """A file that was read and checked, before anything of it is used."""

    tower: KnownTower
    measured: Sequence[tuple[KernelMeasurements[Any, Any], Mapping[Any, Measured]]]
    """Whose measurements, and what the file says of them."""
    device: torch.device
    compiled: bytes | None
    """What torch compiled; None: nothing, with eager pieces, say."""
    kernels: dict[str, bytes]
    """The files of other compiled kernels, as `compiled_kernels` names them."""

    def hand_over(self) -> None:
        """Passes compiled code to torch and Triton, and measurements to the choice of kernels.

        Raises:
            StartFileError: torch or a compiler refuses it. What torch has taken by then is found by its
                content alone: it changes nothing for other code.
        """
        if self.compiled is not None:
            _hand_to_torch(self.compiled)
        try:
            restore_kernels(self.kernels)
        except (OSError, ValueError) as error:
            raise StartFileError(f"kernels: expected compiled kernels; got {error}") from error
        for measurements, table in self.measured:
            measurements.add(self.device, table)


def _hand_to_torch(compiled: bytes) -> None:
    problem = ""
    try:
        if torch.compiler.load_cache_artifacts(compiled) is not None:
            return
    except Exception as error:  # whatever it raises of another process's bytes
        problem = f" ({type(error).__name__}: {error})"
    raise StartFileError(
        f"{_COMPILED}: expected graphs that torch compiled; got {len(compiled)} bytes{problem}"
    )


# --- what a file holds for


def environment_key(device: torch.device, measurements: Iterable[KernelMeasurements[Any, Any]] = ()) -> Key:
    """Returns what has to be the same where a start is loaded. The driver is not in it: compiled kernels are
    binaries for the GPU's architecture, and of the driver need no more than this torch does.

    Args:
        measurements: those of the operations whose kernels are chosen.
    """
    key: Key = {
        "fxsplit_encoder": VERSION,
        "fxsplit_encoder.code": _own_code(),
        "python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
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
    """Returns what a start has to have been made for: the tower, and how it is captured."""
    config, tower = generation.config, generation.served.tower
    settings = {
        name: _setting(getattr(config, name))
        for name in type(config).model_fields
        if name not in _IGNORED_SETTINGS
    }
    limits = generation.served.limits
    return plain(
        {
            "tower": _name(type(tower)),
            "tower.modules": _structure(tower),
            "dtype": str(generation.served.dtype),
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


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _own_code() -> str:
    """A digest of this package's code, whose version does not change with every commit."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _structure(tower: object) -> str | None:
    """A digest of a tower's modules, parameters and buffers, without values; None for no module."""
    part = tower_part(tower)
    if part is None:
        return None
    lines = [f"{name} {_name(type(module))}" for name, module in part.named_modules()]
    tensors = (*part.named_parameters(), *part.named_buffers())
    lines += [f"{name} {tuple(each.shape)} {each.stride()} {each.dtype}" for name, each in tensors]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _setting(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _setting(each) for name, each in value.items()}
    if callable(value):
        return getattr(value, "__qualname__", repr(type(value)))
    return value if isinstance(value, int | float | list | tuple | None) else str(value)


# --- the file


def write_parts(path: Path, parts: Mapping[str, bytes]) -> int:
    """Replaces the file by one with these parts; returns its bytes.

    Raises:
        InputError: it cannot be written; what was there is still there.
    """
    payload = io.BytesIO()
    with zipfile.ZipFile(payload, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    body = payload.getvalue()
    line = b"%s%d %d %s\n" % (_MAGIC, FORMAT, len(body), hashlib.sha256(body).hexdigest().encode())
    try:
        write_atomic(path, line + body, durable=True)
    except OSError as error:
        raise InputError(f"{path}: the start cannot be written: {error}") from error
    return len(line) + len(body)


def read_parts(path: Path) -> StartParts:
    """Opens a file that no other user can write; its parts are not unpacked yet.

    Raises:
        StartFileError: there is none, others can write it, it is of another format, cut short or damaged.
    """
    try:
        check_trusted(path)  # it holds code
        content = path.read_bytes()
    except OSError as error:
        raise StartFileError(f"file: expected a saved start; got {type(error).__name__}: {error}") from error
    line, newline, body = content.partition(b"\n")
    words = line[:_LONGEST_LINE].removeprefix(_MAGIC).split(b" ")
    if not (line.startswith(_MAGIC) and newline and len(words) == 3 and words[0].isdigit()):
        raise StartFileError(f"file: expected one that save_start wrote; got {len(content)} bytes of another")
    if int(words[0]) != FORMAT:
        raise StartFileError(f"format: expected {FORMAT}; got {int(words[0])}")
    if not words[1].isdigit() or int(words[1]) != len(body):
        raise StartFileError(f"length: expected {words[1].decode('latin-1')} bytes; got {len(body)}")
    digest = hashlib.sha256(body).hexdigest()
    if digest.encode() != words[2]:
        raise StartFileError(f"digest: expected {words[2].decode('latin-1')}; got {digest}")
    return StartParts(body)


class StartParts(Mapping[str, bytes]):
    """The parts of a file by name, each of them unpacked when it is asked for.

    Raises:
        StartFileError: the archive is damaged or forged, or its parts are too large.
    """

    def __init__(self, body: bytes) -> None:
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(body))
        except _OF_ARCHIVES as error:
            raise StartFileError(f"archive: expected a zip; got {type(error).__name__}: {error}") from error
        infos = self._archive.infolist()
        self._names = list(dict.fromkeys(info.filename for info in infos))
        size = sum(info.file_size for info in infos)
        if len(self._names) != len(infos) or size > _MOST_BYTES:
            limit = f"expected parts of different names and at most {_MOST_BYTES} bytes"
            raise StartFileError(f"archive: {limit}; got {len(infos)} parts of {size} bytes")

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        try:
            return self._archive.read(name)
        except _OF_ARCHIVES as error:
            raise StartFileError(f"{name}: expected a part; got {type(error).__name__}: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def towers_to_json(towers: Sequence[KnownTower]) -> bytes:
    """Encodes towers as a part of a file."""
    return json.dumps([asdict(tower) for tower in towers], indent=1).encode()


def towers_from_json(content: bytes) -> list[KnownTower]:
    """Decodes the towers of a part of a file.

    Raises:
        StartFileError: it holds something else.
    """
    try:
        return _KNOWN_TOWERS.validate_python(json.loads(content))
    except (ValueError, ValidationError) as error:
        raise StartFileError(f"towers: expected what was measured of towers; got {error}") from error


def table_to_json(table: Mapping[ShapeT, Measured]) -> bytes:
    """Encodes the measurements of an operation as a part of a file."""
    return json.dumps(entries_of(table), indent=1).encode()


def table_from_json(content: bytes, shape: type[ShapeT], device: torch.device) -> dict[ShapeT, Measured]:
    """Decodes the measurements of an operation on a device.

    Raises:
        StartFileError: it holds something else.
    """
    try:
        entries: list[Mapping[str, Any]] = json.loads(content)
        return table_of(entries, shape, device)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StartFileError(f"{shape.operation}: expected measured classes; got {error!r}") from error
