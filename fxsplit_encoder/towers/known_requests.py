"""What a packed tower has read of requests, by all that reading looks at, so that the next alike is not read.

Inputs may change between requests without a trace. So what is looked up is made anew of each: the numbers in
its grids, and what tensors of patches say of themselves but their values, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.inputs import INTEGERS

# Requests that are kept, and the most items and tensors of patches of one. Choices: a service sees few sizes.
_KEPT = 1024
_MOST_ITEMS = 64

_ONLY_INTEGERS = {int}


class Described:
    """What the inputs of requests say of their items: the same object for all that say the same."""

    __slots__ = ("grids", "missing", "num_images")

    def __init__(self, grids: Sequence[Grid], num_images: int, missing: tuple[str, str] | None) -> None:
        self.grids = tuple(grids)
        """Of the images, then of the videos."""
        self.num_images = num_images
        self.missing = missing
        """The names of patches that were not given, and of their grids; None: all were."""


class Look(NamedTuple):
    """A look at a request's inputs, consistent in itself whatever becomes of them meanwhile."""

    key: Hashable
    """Requests of equal keys are read alike."""
    patches: list[Tensor]
    """As they were given, in the order of their names."""
    inputs: dict[str, Any]
    """The inputs, with the grids that the key has."""


def look(mm_kwargs: dict[str, Any], input_keys: Sequence[tuple[str, str]]) -> Look | None:
    """Looks at a request; None: something in it is nothing that is looked up, so that it has to be read.

    Args:
        input_keys: the names of patches and of their grids. With any other input a request is read.
    """
    entries: list[Hashable] = []
    patches: list[Tensor] = []
    inputs: dict[str, Any] = {}
    seen = 0
    for key, grid_key in input_keys:
        seen += (key in mm_kwargs) + (grid_key in mm_kwargs)
        parts, grids = mm_kwargs.get(key), mm_kwargs.get(grid_key)
        if parts is not None:
            inputs[key] = several = list(parts) if isinstance(parts, list | tuple) else [parts]
            entries.append(key)
            for part in several:
                if type(part) is not Tensor or part.is_nested:
                    return None
                entries.append((part.shape, part.dtype, part.device, part.layout))
            patches += several
        if grids is not None:
            if (numbers := _numbers_of(grids)) is None:
                return None
            entries.append((grid_key, numbers))
            inputs[grid_key] = numbers
    if seen != len(mm_kwargs) or not inputs or len(patches) > _MOST_ITEMS:
        return None
    return Look(tuple(entries), patches, inputs)


def _numbers_of(grids: Any) -> tuple[tuple[int, ...], ...] | None:
    """A few grids as Python's numbers; None: they are many, or something else."""
    if type(grids) is Tensor:
        is_plain = grids.dtype in INTEGERS and not (grids.is_nested or grids.is_meta)
        if not is_plain or grids.layout != torch.strided or grids.dim() != 2:
            return None
        return tuple(map(tuple, grids.tolist())) if 0 < grids.numel() <= 3 * _MOST_ITEMS else None
    if type(grids) is not list or not 0 < len(grids) <= _MOST_ITEMS:
        return None
    for row in grids:
        # True and 1.0 are equal to 1, and no integers.
        if type(row) is not tuple or not 0 < len(row) <= 3 or set(map(type, row)) != _ONLY_INTEGERS:
            return None
    return tuple(grids)


class KnownRequests:
    """What was read, by `Look.key`. Once there is too much, all of it is forgotten."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Described] = {}

    def __reduce__(self) -> tuple[type[KnownRequests], tuple[()]]:
        return KnownRequests, ()  # copies, also those for other processes, know of none

    def get(self, key: Hashable) -> Described | None:
        """What was read of requests with this key; None: none was."""
        return self._known.get(key)

    def keep(self, key: Hashable, described: Described) -> None:
        """Remembers what was read. Threads may call this at the same time."""
        if len(self._known) >= _KEPT:
            self._known = {}
        self._known[key] = described
