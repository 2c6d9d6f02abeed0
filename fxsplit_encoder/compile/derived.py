"""Parameters in another form (padded, quantized), computed once and kept where captured graphs find them.

A derived parameter has one address for the life of its program, but for those that only others are derived
from, which are dropped once these are computed. Whenever the parameters that it comes from
are others than at the last check, it is computed again, into the same memory: at another address, of another
version, which every change in place raises, or with other bits among those that are sampled, which shows what
was written through `parameter.data`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.tensors import version_of
from fxsplit_encoder.compile.fingerprints import Fingerprints

logger = logging.getLogger(__name__)

_WRITTEN = (
    "were written through `.data`, which leaves no version: they are computed again. What was encoded since "
    "that write may have used the old ones; call fxsplit_encoder.refresh(model) right after such a write"
)
_UNVERSIONED = (
    "are inference tensors, which have no versions: they are computed again at every call. Load the model "
    "under torch.no_grad() instead of torch.inference_mode()"
)


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

    A copy or a pickle has none yet: they are computed when it is run.
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
        self._versions: list[int] | None = []
        """None for inference tensors, which have none."""
        self._fingerprints = Fingerprints()
        self._values: dict[int, Tensor] = {}
        self._is_outdated = False
        self._said: set[str] = set()
        self.stamp: object = None
        """Another one whenever they have been computed."""

    def __reduce__(self) -> Any:
        return DerivedParameters, (self.recipes,)

    @property
    def num_bytes(self) -> int:
        """Memory that the derived parameters take in addition to those that they come from."""
        return sum(value.numel() * value.element_size() for value in self._values.values())

    def fill(self, slots: list[Any], stamp: object = None) -> None:
        """Fills the slots of the derived parameters of a run from those of its parameters.

        Args:
            stamp: as of `refresh`, of a time since when the parameters are the same tensors, too.
        """
        if not self.recipes:
            return
        if stamp is None or stamp is not self.stamp:
            self._sources = {slot: slots[slot] for slot in self._given}
        self.refresh(stamp)
        self.follow_writes()
        for slot, value in self._values.items():
            slots[slot] = value

    def refresh(self, stamp: object = None) -> bool:
        """Computes again what the parameters of the last run have outdated by their addresses and versions;
        returns whether anything was. About 150 nanoseconds per parameter that has derived ones on the host of
        an H200.

        Args:
            stamp: the one of a time since when the caller knows that no parameter has moved: where it still
                holds, parameters are asked for their versions alone.
        """
        if not self.recipes:
            return False
        sources = self._sources.values()
        versions: list[int] | None = None
        try:
            versions = list(map(version_of, sources))
        except RuntimeError:  # an inference tensor's
            self._say(_UNVERSIONED)
        are_known = stamp is not None and stamp is self.stamp
        addresses = self._addresses if are_known else list(map(torch.Tensor.data_ptr, sources))
        if versions == self._versions and addresses == self._addresses:
            return False
        self._compute()
        self._addresses, self._versions = addresses, versions
        return True

    def follow_writes(self) -> None:
        """Computes everything again after writes that changed neither addresses nor versions, once a
        comparison has found them (`compile.fingerprints`), and after `outdate`; of tensors that have no
        versions always.
        """
        if not self.recipes:
            return
        is_asked_to = self._is_outdated or self._versions is None
        if not (is_asked_to or self._fingerprints.have_changed()) or self.refresh():
            return
        if not is_asked_to:
            self._say(_WRITTEN)
        self._compute()

    def compare(self) -> object:
        """As `Fingerprints.compare`, for a later `follow_writes`."""
        return self._fingerprints.compare()

    def outdate(self) -> None:
        """Has the next run or replay compute everything again."""
        self._is_outdated = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self) -> None:
        self.stamp = object()  # first: of one that fails, what was known before holds no more
        available = dict(self._sources)
        for recipe in self.recipes:
            made = recipe.make(*(available[slot] for slot in recipe.sources))
            available[recipe.slot] = self._keep(recipe.slot, made) if recipe.is_kept else made
            for slot in {*recipe.sources}:
                if self._dropped.get(slot) == recipe.slot:
                    del available[slot]
        self._fingerprints.take(self._sources.values())
        self._is_outdated = False

    def _keep(self, slot: int, made: Tensor) -> Tensor:
        """The tensor of a slot, where captures read it, with the values that were made."""
        kept = self._values.setdefault(slot, made)
        return kept if kept is made else kept.copy_(made)

    def _say(self, what: str) -> None:
        """Warns of something, once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning(
                "parameters that are kept in another form (padded, merged, quantized), %d in all: they %s",
                *(len(self._sources), what),
            )


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
