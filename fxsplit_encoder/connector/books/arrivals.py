"""Rows between their encoder and where they will lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxsplit_encoder.connector.books.entry import Entry, Feature
from fxsplit_encoder.connector.books.events import Event
from fxsplit_encoder.connector.books.host_buffers import HOST
from fxsplit_encoder.connector.books.parts import Parts
from fxsplit_encoder.connector.states import Residence


@dataclass(eq=False)
class Arrival:
    """Rows that were encoded, and what has to be done with them."""

    entry: Entry
    feature: Feature
    rows: Any
    """As the encoder returned them."""
    is_copied: bool
    """Whether they have to be copied to the host; if not, they stay where they are."""
    buffer: Any | None = None
    """The host buffer that takes the copy; None: one has to be allocated."""
    capacity: int = 0
    """Its bytes."""


def place(parts: Parts, entry: Entry, rows: Any) -> Arrival:
    """Decides where the rows of an entry will lie. Its memory on the host stays reserved until they are
    there: whatever goes wrong before, it can be encoded again.
    """
    feature = Feature(rows, Residence.DEVICE, "")
    if parts.storage.claim_device(str(rows.device), feature, rows.nbytes):
        entry.feature = feature
        return Arrival(entry, feature, rows, is_copied=False)
    entry.feature = feature = Feature(None, Residence.HOST, HOST)
    buffer = parts.storage.buffers.buffer(entry)
    return Arrival(entry, feature, rows, True, buffer, parts.ledger.owned(HOST, entry))


def settle_in(parts: Parts, entry: Entry) -> None:
    """The rows of an entry are there: its memory becomes theirs, or is free if they lie elsewhere."""
    assert entry.feature is not None
    if entry.feature.residence is Residence.HOST:
        parts.storage.buffers.move(entry, entry.feature)
    else:
        parts.storage.buffers.release(entry)


def orphan(parts: Parts, entry: Entry, events: list[Event], *, is_free: bool = True) -> Feature:
    """The rows of an entry will not get there. A buffer that they may still be copied to goes with them, and
    the entry is left without memory.

    Args:
        parts: of the books.
        entry: whose rows were placed.
        events: when everything is over that was given to the device for them.
        is_free: whether that is all there will be.
    """
    feature, entry.feature = entry.feature, None
    assert feature is not None
    feature.read_events = list(events)
    if feature.residence is Residence.HOST:
        parts.storage.buffers.move(entry, feature)
    if is_free:
        parts.storage.free(feature)
    return feature
