"""Saving a start, and loading it: everything is checked before anything of it is used.

The file is one line that says what it is and its digest, then a zip of named parts. Nothing of it is read
before the digest is right, and it is written as a whole or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.compiler
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fxsplit_encoder.errors import InputError, StartFileError
from fxsplit_encoder.kernels import KernelMeasurements, Measured
from fxsplit_encoder.kernels.compiled import compiled_kernels, restore_kernels
from fxsplit_encoder.kernels.kernel import ShapeT
from fxsplit_encoder.kernels.store import entries_of, table_of, write_atomic
from fxsplit_encoder.runtime import KnownCosts
from fxsplit_encoder.start.environment import Key, differences, environment_key

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class KnownTower:
    """What was found out of one tower under one configuration."""

    __pydantic_config__ = _STRICT

    key: Key
    """What tells it from others, see `manager.start`."""
    paths: Mapping[str, KnownCosts]
    """By the label of a path."""
    programs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The traced programs, by the label of a path; without those that cannot be saved."""


_KNOWN_TOWERS = TypeAdapter(list[KnownTower])


def towers_to_json(towers: Sequence[KnownTower]) -> bytes:
    """The towers as a part of a file."""
    return json.dumps([asdict(tower) for tower in towers], indent=1).encode()


def towers_from_json(content: bytes) -> list[KnownTower]:
    """The towers of a part of a file.

    Raises:
        StartFileError: it holds something else.
    """
    try:
        return _KNOWN_TOWERS.validate_python(json.loads(content))
    except (ValueError, ValidationError) as error:
        raise StartFileError(f"towers: expected what was measured of towers; got {error}") from error


def table_to_json(table: Mapping[ShapeT, Measured]) -> bytes:
    """What was measured of an operation as a part of a file."""
    return json.dumps(entries_of(table), indent=1).encode()


def table_from_json(content: bytes, shape: type[ShapeT], device: torch.device) -> dict[ShapeT, Measured]:
    """What a part of a file says of an operation, for a device.

    Raises:
        StartFileError: it holds something else.
    """
    try:
        entries: list[Mapping[str, Any]] = json.loads(content)
        return table_of(entries, shape, device)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StartFileError(f"{shape.operation}: expected measured classes; got {error!r}") from error


_MAGIC = b"fxsplit_encoder start "

FORMAT = 2
"""Changes when what is in the file does."""

_LONGEST_LINE = 200


def write_parts(path: Path, parts: Mapping[str, bytes]) -> int:
    """Replaces the file by one with these parts; how many bytes it has.

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


def read_parts(path: Path) -> dict[str, bytes]:
    """The parts of a file, whole and undamaged.

    Raises:
        StartFileError: there is none, it is of another format, cut short or damaged.
    """
    try:
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
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


Content = TypeVar("Content")

# The parts of a file.
_ENVIRONMENT, _TOWERS, _COMPILED = "environment.json", "towers.json", "torch.bin"
_KERNELS, _MEASURED = "kernels/", "measured/"

_Measurements = Sequence[KernelMeasurements[Any, Any]]


@dataclass(frozen=True)
class ReadStart:
    """A file that was read and checked; nobody has anything of it yet."""

    tower: KnownTower
    measured: Sequence[tuple[KernelMeasurements[Any, Any], Mapping[Any, Measured]]]
    """Whose measurements, and what the file says of them."""
    device: torch.device
    compiled: bytes | None
    """What torch compiled; None: nothing, with eager pieces, say."""
    kernels: dict[str, bytes]
    """The files of other compiled kernels, as `compiled_kernels` names them."""

    def hand_over(self) -> None:
        """Gives torch, Triton and the choice of kernels what is in it for them.

        Raises:
            StartFileError: torch or a compiler refuses it. What torch has taken by then is found by its
                content alone: whoever compiles something else does not see it.
        """
        if self.compiled is not None:
            _hand_to_torch(self.compiled)
        try:
            restore_kernels(self.kernels)
        except (OSError, ValueError) as error:
            raise StartFileError(f"kernels: expected compiled kernels; got {error}") from error
        for measurements, table in self.measured:
            measurements.add(self.device, table)


def save(path: Path, device: torch.device, measurements: _Measurements, towers: Sequence[KnownTower]) -> int:
    """Writes what this process compiled, and what was measured on a device; how many bytes it has.

    Raises:
        InputError: the file cannot be written.
    """
    compiled = torch.compiler.save_cache_artifacts()
    parts = {
        _ENVIRONMENT: json.dumps(environment_key(device, measurements), indent=1).encode(),
        _TOWERS: towers_to_json(towers),
        **{_part_of(each): table_to_json(each.table(device)) for each in measurements},
        **{f"{_KERNELS}{name}": content for name, content in compiled_kernels().items()},
    }
    if compiled is not None:
        parts[_COMPILED] = compiled[0]
    return write_parts(path, parts)


def read(path: Path, device: torch.device, key: Key, measurements: _Measurements) -> ReadStart:
    """Reads a file for a tower, and checks all of it.

    Raises:
        StartFileError: it is damaged, or was made for something else.
    """
    parts = read_parts(path)
    environment = _part(parts, _ENVIRONMENT, lambda content: dict(json.loads(content)))
    if different := differences(environment_key(device, measurements), environment):
        raise StartFileError(*different)
    tower = _the_one_of(key, _part(parts, _TOWERS, towers_from_json))
    tables = [
        (
            each,
            _part(parts, _part_of(each), functools.partial(table_from_json, shape=each.shape, device=device)),
        )
        for each in measurements
    ]
    kernels = {name.removeprefix(_KERNELS): part for name, part in parts.items() if name.startswith(_KERNELS)}
    return ReadStart(tower, tables, device, parts.get(_COMPILED), kernels)


def _hand_to_torch(compiled: bytes) -> None:
    problem = ""
    try:
        if torch.compiler.load_cache_artifacts(compiled) is not None:
            return
    except Exception as error:  # whatever it raises of what is not its own
        problem = f" ({type(error).__name__}: {error})"
    raise StartFileError(
        f"{_COMPILED}: expected graphs that torch compiled; got {len(compiled)} bytes{problem}"
    )


def _part_of(measurements: KernelMeasurements[Any, Any]) -> str:
    return f"{_MEASURED}{measurements.shape.operation}.json"


def _part(parts: dict[str, bytes], name: str, read: Callable[[bytes], Content]) -> Content:
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
