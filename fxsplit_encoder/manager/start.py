"""A manager's start on disk: which tower and settings it was measured for, and what is saved of its paths."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxsplit_encoder.errors import CompileError, StartFileError
from fxsplit_encoder.kernels import KernelMeasurements
from fxsplit_encoder.manager.tower_part import tower_part
from fxsplit_encoder.start import Key, KnownTower, plain, read, save

if TYPE_CHECKING:
    from fxsplit_encoder.manager.generation import Generation
    from fxsplit_encoder.start import ReadStart

logger = logging.getLogger(__name__)

Measurements = Sequence[KernelMeasurements[Any, Any]]
"""Of every operation that has several kernels."""

# Settings that change nothing of what is compiled, measured or chosen.
_OF_NO_MATTER = ("start_file", "debug", "capture_recurring", "weight_check_seconds")


def save_captured(generation: Generation, measurements: Measurements, path: Path) -> int:
    """Writes what was compiled, measured and chosen for captures; how many bytes the file has."""
    paths = {each.label: each.known() for each in generation.paths_by_key.values()}
    programs = {}
    for each in generation.paths_by_key.values():
        if each.program is None:  # it is captured as it is
            continue
        try:
            programs[each.label] = each.forward.to_save()
        except CompileError as error:
            logger.warning("%s: a start from %s will trace it again: %s", each.label, path, error)
    tower = KnownTower(tower_key(generation), paths, programs)
    return save(path, generation.pool.device, measurements, [tower])


def save_programs(
    generation: Generation, measurements: Measurements, programs: Mapping[str, dict[str, Any]], path: Path
) -> None:
    """Writes programs alone, by the labels of their paths, before anything was measured."""
    tower = KnownTower(tower_key(generation), {}, programs)
    save(path, generation.pool.device, measurements, [tower])


def load_captured(generation: Generation, measurements: Measurements, path: Path) -> None:
    """Has captures made by what is in a file.

    Raises:
        StartFileError: it is damaged, or was made for something else. Nothing of it is used then.
    """
    start = read(path, generation.pool.device, tower_key(generation), measurements)
    paths = list(generation.paths_by_key.values())
    for each in paths:
        if each.label not in start.tower.paths:
            raise StartFileError(f"{each.label}: expected what was measured of it; got nothing")
    start.hand_over()
    for each in paths:
        each.expect(start.tower.paths[each.label])
    _use_programs(generation, start)


def load_programs(generation: Generation, measurements: Measurements, path: Path) -> None:
    """Has forwards restored from what `save_programs` wrote.

    Raises:
        StartFileError: as of `load_captured`.
    """
    start = read(path, generation.pool.device, tower_key(generation), measurements)
    start.hand_over()
    _use_programs(generation, start)


def _use_programs(generation: Generation, start: ReadStart) -> None:
    for each in generation.paths_by_key.values():
        each.forward.saved = start.tower.programs.get(each.label)
        each.forward.options = replace(each.forward.options, is_known=True)


def tower_key(generation: Generation) -> Key:
    """What a start has to have been made for: the tower, and how it is captured."""
    config, tower = generation.config, generation.served.tower
    settings = {
        name: _setting(getattr(config, name))
        for name in type(config).model_fields
        if name not in _OF_NO_MATTER
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
