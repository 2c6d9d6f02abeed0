"""Saving a start, and loading it: everything is checked before anything of it is used."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.compiler

from fxsplit_encoder.attention.kernels.binaries import compiled_kernels, restore_kernels
from fxsplit_encoder.errors import StartFileError
from fxsplit_encoder.kernels import KernelMeasurements, Measured
from fxsplit_encoder.products.quack_files import compiled_files, restore_files
from fxsplit_encoder.start.container import read_parts, write_parts
from fxsplit_encoder.start.environment import Key, differences, environment_key
from fxsplit_encoder.start.found import (
    KnownTower,
    table_from_json,
    table_to_json,
    towers_from_json,
    towers_to_json,
)

Content = TypeVar("Content")

# The parts of a file.
_ENVIRONMENT, _TOWERS, _COMPILED = "environment.json", "towers.json", "torch.bin"
_KERNELS, _MEASURED = "kernels/", "measured/"

# Among the kernels.
_QUACK = "quack/"

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
    """The files of other compiled kernels, as `compiled_kernels` names them, and QuACK's."""

    def hand_over(self) -> None:
        """Gives torch, Triton and the choice of kernels what is in it for them.

        Raises:
            StartFileError: torch or a compiler refuses it. What torch has taken by then is found by its
                content alone: whoever compiles something else does not see it.
        """
        if self.compiled is not None:
            _hand_to_torch(self.compiled)
        try:
            products = {name: part for name, part in self.kernels.items() if name.startswith(_QUACK)}
            restore_files({name.removeprefix(_QUACK): part for name, part in products.items()})
            restore_kernels({name: part for name, part in self.kernels.items() if name not in products})
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
        **{f"{_KERNELS}{_QUACK}{name}": content for name, content in compiled_files().items()},
    }
    if compiled is not None:
        parts[_COMPILED] = compiled[0]
    return write_parts(path, parts)


def read(path: Path, device: torch.device, key: Key, measurements: _Measurements) -> ReadStart:
    """Reads a file for a tower, and checks all of it.

    Args:
        key: of the tower and its configuration.
        measurements: those of the operations whose kernels are chosen.

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
