"""What was measured of towers, as JSON and back; whatever is not of that form is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fxsplit_encoder.errors import StartFileError
from fxsplit_encoder.kernels import Measured
from fxsplit_encoder.kernels.base import ShapeT
from fxsplit_encoder.kernels.cache import entries_of, table_of
from fxsplit_encoder.runtime import KnownCosts
from fxsplit_encoder.start.environment import Key

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


_TOWERS = TypeAdapter(list[KnownTower])


def towers_to_json(towers: Sequence[KnownTower]) -> bytes:
    """The towers as a part of a file."""
    return json.dumps([asdict(tower) for tower in towers], indent=1).encode()


def towers_from_json(content: bytes) -> list[KnownTower]:
    """The towers of a part of a file.

    Raises:
        StartFileError: it holds something else.
    """
    try:
        return _TOWERS.validate_python(json.loads(content))
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
