"""Features that are kept though nobody holds them move from a device to the host, while workers have time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fxsplit_encoder.connector.books.entry import Entry, Feature
from fxsplit_encoder.connector.books.events import Event
from fxsplit_encoder.connector.books.host_buffers import HOST, capacity_of
from fxsplit_encoder.connector.books.parts import Parts
from fxsplit_encoder.connector.states import Residence


@dataclass(eq=False)
class Demotion:
    """One move."""

    entry: Entry
    source: Feature
    target: Feature
    buffer: Any | None
    """The host buffer; None: one of so many bytes has to be allocated."""
    capacity: int
    events: list[Event] = field(default_factory=list)
    """When the copy is over."""


class Demotions:
    """Hands out moves, and takes what becomes of them. No feature makes way for one that is moved."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.moving: dict[Demotion, None] = {}
        self._in_vain: tuple[int, int] | None = None
        """What had happened when there was nothing that could be moved."""

    @property
    def may_move(self) -> bool:
        """Whether it makes sense to ask for one."""
        return any(self._parts.cache.resting_on_device()) and self._in_vain != self._happened

    @property
    def _happened(self) -> tuple[int, int]:
        """Changes with what may let something move."""
        return self._parts.cache.num_rests, self._parts.ledger.num_releases

    def take(self) -> Demotion | None:
        """The next feature to move; None: there is none, or no memory for it."""
        if not self.may_move:
            return None
        moving = {move.entry for move in self.moving}
        buffers = self._parts.storage.buffers
        for entry in self._parts.cache.resting_on_device():
            source = entry.feature
            assert source is not None
            fits = capacity_of(entry.num_bytes) <= buffers.available()
            if entry not in moving and fits and not source.is_being_written:
                target = Feature(None, Residence.HOST, HOST)
                reserved = buffers.reserve(target, entry.num_bytes)
                assert reserved
                source.num_reads += 1
                capacity = self._parts.ledger.owned(HOST, target)
                move = Demotion(entry, source, target, buffers.buffer(target), capacity)
                self.moving[move] = None
                return move
        self._in_vain = self._happened
        return None

    def attach(self, move: Demotion, buffer: Any) -> None:
        """A buffer was allocated for a move."""
        self._parts.storage.buffers.attach(move.target, buffer)

    def finish(self, move: Demotion, rows: Any | None) -> None:
        """The copy is over, or was not made.

        Args:
            move: as it was taken.
            rows: on the host; None: the copy failed, and the feature stays where it is.
        """
        del self.moving[move]
        move.source.num_reads -= 1
        entry = move.entry
        if rows is not None and entry.feature is move.source:
            move.target.rows = rows
            entry.feature = move.target
            self._parts.cache.moved_to_host(entry)
            self._parts.stats.demotions += 1
            self._parts.storage.free(move.source)
        else:
            move.target.read_events = list(move.events)
            self._parts.storage.free(move.target)
        self._in_vain = None
        self._parts.storage.was_freed = True
