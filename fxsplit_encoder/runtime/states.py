"""Captures for the states that a tower was in before, such as those with other adapters active."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import torch

from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder.runtime.unpadded import free_bytes

_MOST_STATES = 8
"""States whose captures are kept besides the present one's: as many as torch.compile keeps of a function."""


class OfOneState(Protocol):
    """Captures of a tower in one state."""

    @property
    def structure(self) -> Structure | None:
        """The state: the tower's modules, and the values that they read."""

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the captures take."""

    @property
    def derived_bytes(self) -> int:
        """Bytes of the parameters in another form that their programs keep, such as folded adapters."""

    def may_return(self) -> bool:
        """Whether the tower may be in this state again."""

    def outdate_weights(self) -> None:
        """Makes the next replay check the weights and recompute derived ones."""


_Captures = TypeVar("_Captures", bound=OfOneState)


class OtherStates(Generic[_Captures]):
    """Keeps captures of states that the tower is not in, and evicts the least recently used.

    Args:
        release: frees captures that leave.
        max_bytes: that all may take; None: no limit but the device's.
    """

    def __init__(self, release: Callable[[_Captures], None], max_bytes: int | None) -> None:
        self._release = release
        self._max_bytes = max_bytes
        self._kept: list[_Captures] = []

    def __iter__(self) -> Iterator[_Captures]:
        return iter([*self._kept])

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that all take, parameters in another form included."""
        return sum(map(_bytes, self._kept))

    def find(self, present: _Captures) -> _Captures | None:
        """Returns those of the state that the tower is in, of the `present` captures and these; or None."""
        each_by = {each.structure: each for each in (present, *self._kept) if each.structure is not None}
        now = Structure.of_now([*each_by])
        if now is present.structure:  # what has changed may be adapters that were deleted
            self._drop_gone()
        return None if now is None else each_by[now]

    def take(self, found: _Captures) -> None:
        """Gives captures up without releasing them."""
        self._kept.remove(found)

    def put(self, captures: _Captures, instead_of: _Captures | None = None) -> None:
        """Keeps captures of a state that the tower has left, for those of its present one; releases them if
        their state cannot come back.
        """
        if captures.structure is not None and captures.structure.has_merged:
            for each in (captures, *self._kept):  # which read the weights that were merged into
                each.outdate_weights()
        if instead_of is not None:
            self.take(instead_of)
        if not captures.may_return():
            self._release(captures)
            return
        self._kept.append(captures)
        if len(self._kept) > _MOST_STATES:
            self._leave(self._kept[0])

    def make_room(self, device: torch.device) -> None:
        """Releases what can serve no more, and then what has to go for captures of one more state, which are
        taken to need as much memory of a device as the largest of these.
        """
        self._drop_gone()
        while self._kept and not self._has_room(device):
            self._leave(self._kept[0])

    def clear(self) -> None:
        """Releases all."""
        for each in self:
            self._leave(each)

    def _drop_gone(self) -> None:
        for each in self:
            if not each.may_return():
                self._leave(each)

    def _leave(self, captures: _Captures) -> None:
        self._kept.remove(captures)
        self._release(captures)

    def _has_room(self, device: torch.device) -> bool:
        needed = max(map(_bytes, self._kept))
        if self._max_bytes is not None and self.num_bytes + needed > self._max_bytes:
            return False
        free = free_bytes(device)
        return free is None or free >= needed


def _bytes(captures: OfOneState) -> int:
    return captures.num_bytes + captures.derived_bytes
