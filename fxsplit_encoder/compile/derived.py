"""Parameters in another form (padded, quantized), computed once and kept where captured graphs find them.

A derived parameter has one address for the life of its program, but for those that only others are derived
from, which are dropped once these are computed. Whenever the parameters that it comes from
are others than at the last check (another address, or another version, which every change in place raises),
it is computed again, into the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.tensors import version_of
from fxsplit_encoder.errors import InputError


@dataclass(frozen=True, slots=True)
class DerivedParameter:
    """What fills a slot of a program from other slots."""

    slot: int
    sources: tuple[int, ...]
    """Slots of parameters, or of parameters derived before this one."""
    make: Callable[..., Tensor]
    """A function of the sources' tensors."""
    is_kept: bool = True
    """Whether a step reads it. One that only others are derived from is dropped as soon as they are."""


class DerivedParameters:
    """The derived parameters of one program, on the parameters that it was last run with.

    A change that leaves no trace is not seen: one through `parameter.data`, which has a version of its own.
    """

    def __init__(self, recipes: Iterable[DerivedParameter] = ()) -> None:
        self.recipes = _beside_readers(tuple(recipes))
        last_reads = {slot: recipe.slot for recipe in self.recipes for slot in recipe.sources}
        self._dropped = {
            recipe.slot: last_reads[recipe.slot] for recipe in self.recipes if not recipe.is_kept
        }
        made = {recipe.slot for recipe in self.recipes}
        self._given = sorted({slot for recipe in self.recipes for slot in recipe.sources} - made)
        self._sources: dict[int, Tensor] = {}
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._values: dict[int, Tensor] = {}
        self.stamp: object = None
        """Another one whenever they have been computed."""

    @property
    def num_bytes(self) -> int:
        """Memory that the derived parameters take in addition to those that they come from."""
        return sum(value.numel() * value.element_size() for value in self._values.values())

    def fill(self, slots: list[Any], stamp: object = None) -> None:
        """Fills the slots of the derived parameters of a run from those of its parameters.

        Args:
            stamp: as of `refresh`, of a time since when the parameters are the same tensors, too.

        Raises:
            InputError: a parameter is an inference tensor, whose changes cannot be seen.
        """
        if not self.recipes:
            return
        if stamp is None or stamp is not self.stamp:
            self._sources = {slot: slots[slot] for slot in self._given}
        self.refresh(stamp)
        for slot, value in self._values.items():
            slots[slot] = value

    def refresh(self, stamp: object = None) -> bool:
        """Computes again what the parameters of the last run have outdated; returns whether anything was.
        About 150 nanoseconds per parameter that has derived ones on the host of an H200.

        Args:
            stamp: the one of a time since when the caller knows that no parameter has moved: where it still
                holds, parameters are asked for their versions alone.

        Raises:
            InputError: a parameter is an inference tensor, whose changes cannot be seen.
        """
        sources = self._sources.values()
        try:
            versions = list(map(version_of, sources))  # an inference tensor raises
        except RuntimeError as error:
            raise InputError(
                "parameters: expected tensors that were made outside of torch.inference_mode(), since passes "
                "and fp8 keep other forms of them and must see when they change; got an inference tensor. "
                "Load the tower under torch.no_grad() instead"
            ) from error
        are_known = stamp is not None and stamp is self.stamp
        addresses = self._addresses if are_known else list(map(torch.Tensor.data_ptr, sources))
        if versions == self._versions and addresses == self._addresses:
            return False
        self.stamp = object()  # first: of one that fails, what was known before holds no more
        self._compute()
        self._addresses, self._versions = addresses, versions
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self) -> None:
        available = dict(self._sources)
        for recipe in self.recipes:
            made = recipe.make(*(available[slot] for slot in recipe.sources))
            kept = self._values.setdefault(recipe.slot, made) if recipe.is_kept else made
            if kept is not made:
                kept.copy_(made)
            available[recipe.slot] = kept
            for slot in {*recipe.sources}:
                if self._dropped.get(slot) == recipe.slot:
                    del available[slot]


def _beside_readers(recipes: tuple[DerivedParameter, ...]) -> tuple[DerivedParameter, ...]:
    """Recipes in an order in which those that are not kept are next to the first that reads them, so that few
    lie in memory at a time; without those that none reads.
    """
    dropped = {recipe.slot: recipe for recipe in recipes if not recipe.is_kept}
    ordered: list[DerivedParameter] = []

    def add(recipe: DerivedParameter) -> None:
        for slot in recipe.sources:
            if slot in dropped:
                add(dropped.pop(slot))
        ordered.append(recipe)

    for recipe in recipes:
        if recipe.is_kept:
            add(recipe)
    return tuple(ordered)
