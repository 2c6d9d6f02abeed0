"""What there is to choose from and what was chosen, for printing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fxsplit_encoder.kernels.choice import Chooser
from fxsplit_encoder.kernels.measure import Measured

_LONGEST = 160
"""Characters of a reason."""


class KernelReport(NamedTuple):
    """One kernel."""

    name: str
    unavailable: str | None
    """Why it cannot run on the device; None: it can."""
    chosen: tuple[str, ...]
    """The classes of calls that it computes."""
    failed: str | None = None
    """What it raises there, of `failing`."""


class ClassReport(NamedTuple):
    """One class of calls that was measured."""

    shape: str
    chosen: str
    pinned: bool
    microseconds: Mapping[str, float]
    """Of one call, by the kernel's name."""
    rejected: Mapping[str, str]
    """Why the other candidates may not be chosen."""


class OperationReport(NamedTuple):
    """All kernels of an operation, in order of preference, and all classes, by their size."""

    kernels: tuple[KernelReport, ...]
    classes: tuple[ClassReport, ...]


def failing(table: Mapping[Any, Measured]) -> dict[str, str]:
    """What kernels raised that worked for no class of a kind, by name: one that cannot be built raises for
    all of them.
    """
    working = {(name, s.dtype, s.kind()) for s, found in table.items() for name in found.microseconds}
    return {
        name: textwrap.shorten(found.rejected[name], _LONGEST, placeholder="...")
        for s, found in table.items()
        for name in found.failed
        if (name, s.dtype, s.kind()) not in working
    }


def describe(device: torch.device, chooser: Chooser[Any, Any]) -> OperationReport:
    """What was measured of an operation on a device, by this process or an earlier one, and what a chooser
    makes of it.
    """
    table = chooser.measurements.table(device)
    classes = []
    for shape in sorted(table, key=lambda s: (str(s.dtype), s.kind(), s.extents())):
        found = table[shape]
        chosen, pinned = chooser.ranking(shape)[0].name, chooser.pinned(shape) is not None
        classes.append(ClassReport(str(shape), chosen, pinned, found.microseconds, found.rejected))
    failed = failing(table)
    kernels = tuple(
        KernelReport(
            kernel.name,
            kernel.unavailable_reason(device),
            tuple(each.shape for each in classes if each.chosen == kernel.name),
            failed.get(kernel.name),
        )
        for kernel in chooser.measurements.kernels
    )
    return OperationReport(kernels, tuple(classes))
