"""Tables computed once from a parameter and the size of a grid, not in the captured forward: interpolation of
learned positions would repeat at every call, some of it on the host, which cannot be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder._torch.modes import without_autograd
from fxsplit_encoder.compile.derived import DerivedParameters, Recipe


class FoldedTable(nn.Module):
    """One table for every grid side, computed from a parameter of the module that this one is a child of.

    Args:
        source: the parameter's name in the parent module, with dots for one of a child's.
        compute: the table, from the parameter and a side.
        sides: the sides of the grids that the tower sees.
    """

    def __init__(self, source: str, compute: Callable[[Tensor, int], Tensor], sides: Iterable[int]) -> None:
        super().__init__()
        self.source = source
        self.compute = compute
        self.sides = sorted(set(sides))

    def forward(self, side: int) -> Tensor:
        """The table of a side, from the last `FoldedTables.refresh`."""
        return self.get_buffer(f"side_{side}")

    def keep(self, side: int, values: Tensor) -> None:
        """Stores the values of a side, in the same memory if they fit: captures read it."""
        old = getattr(self, f"side_{side}", None)
        placement = values.shape, values.dtype, values.device
        if old is not None and (old.shape, old.dtype, old.device) == placement:
            old.copy_(values)
        else:
            self.register_buffer(f"side_{side}", values.clone(), persistent=False)


class FoldedTables:
    """The folded tables inside a module, which follow their parameters as derived parameters do."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [
            (parent, child)
            for parent in module.modules()
            for child in parent.children()
            if isinstance(child, FoldedTable)
        ]
        self._sides = [(n, each, side) for n, (_, each) in enumerate(self._tables) for side in each.sides]
        self._placement: list[tuple[torch.dtype, torch.device]] = []
        self._derived = DerivedParameters()
        self._stamp: object = None

    def refresh(self) -> None:
        """Updates tables whose parameters have changed. Call it outside a traced or captured forward."""
        if self._tables:
            with without_autograd():
                self._refresh()

    def _refresh(self) -> None:
        parameters = [attrgetter(table.source)(parent) for parent, table in self._tables]
        placement = [(each.dtype, each.device) for each in parameters]
        if placement != self._placement:
            self._placement, self._derived = placement, DerivedParameters(self._recipes())
        slots = [*parameters, *[None] * len(self._sides)]
        self._derived.fill(slots)
        if self._derived.stamp is not self._stamp:
            for (_, table, side), values in zip(self._sides, slots[len(parameters) :], strict=True):
                table.keep(side, values)
            self._stamp = self._derived.stamp
        self._derived.compare()

    def outdate(self) -> None:
        """Has the next `refresh` compute all tables again."""
        self._derived.outdate()

    def _recipes(self) -> dict[int, Recipe]:
        made = (Recipe(functools.partial(_table, each.compute, side), (n,)) for n, each, side in self._sides)
        return dict(enumerate(made, start=len(self._tables)))


def _table(compute: Callable[[Tensor, int], Tensor], side: int, parameter: Tensor) -> Tensor:
    return compute(parameter, side).clone(memory_format=torch.contiguous_format)  # it may be the parameter


# --- values of tables


def resized_grid(table: Tensor, side: int, mode: str, *, antialias: bool) -> Tensor:
    """A learned table of positions, (side', side', channels), for another side: (side, side, channels)."""
    if table.shape[0] == side:
        return table
    resized = F.interpolate(
        table.float().permute(2, 0, 1)[None], size=(side, side), mode=mode, antialias=antialias
    )
    return resized[0].permute(1, 2, 0).to(table.dtype)


def resized_positions(table: Tensor, side: int, mode: str, *, leading: int, antialias: bool) -> Tensor:
    """`resized_grid` of a flat table (leading + side * side, channels), whose first rows are class tokens."""
    old_side = round((table.shape[0] - leading) ** 0.5)
    grid = resized_grid(table[leading:].view(old_side, old_side, -1), side, mode, antialias=antialias)
    return torch.cat((table[:leading], grid.flatten(0, 1)))
