"""The states of an item on its way from media to rows, and which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

Availability = Literal["ready", "deferred", "unavailable"]
"""What an engine is told of a request: merge now, ask again in a later step, or never."""


class State(StrEnum):
    """Of an item of a ticket, and of the feature that it shares with equal items of other tickets.

    Where a feature lies and how many hold it are attributes, not states.
    """

    NEW = "new"
    """Known: it is hashed, waits for memory, or is decoded and preprocessed."""

    QUEUED = "queued"
    """Preprocessed, with memory reserved; it waits for an encoder."""

    ENCODING = "encoding"
    """In a batch, or on its way to where it will lie."""

    READY = "ready"
    """Its rows may be read."""

    RELEASED = "released"
    """Nobody of its ticket holds it any more. It may be held again."""

    FAILED = "failed"
    """It will not be encoded; the error says why."""

    CANCELLED = "cancelled"
    """Its ticket does not want it."""


TRANSITIONS: Mapping[State, frozenset[State]] = {
    # Straight on to ENCODING or READY where an equal item is there already.
    State.NEW: frozenset({State.QUEUED, State.ENCODING, State.READY, State.FAILED, State.CANCELLED}),
    # Back to NEW where less is asked of it after memory ran out.
    State.QUEUED: frozenset({State.ENCODING, State.FAILED, State.CANCELLED}),
    # Back to QUEUED for a retry, to NEW where less is asked of it after memory ran out.
    State.ENCODING: frozenset({State.READY, State.QUEUED, State.NEW, State.FAILED, State.CANCELLED}),
    # FAILED only where the device had still to write its rows, and was lost.
    State.READY: frozenset({State.RELEASED, State.CANCELLED, State.FAILED}),
    # Held again: ready where the feature is still kept, else encoded once more.
    State.RELEASED: frozenset({State.NEW, State.QUEUED, State.ENCODING, State.READY, State.CANCELLED}),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""Every change of state that is allowed, for items and for features alike."""

WAITING = frozenset({State.NEW, State.QUEUED, State.ENCODING})
"""The states from which an item may still become ready."""


def check_transition(before: State, after: State, what: object) -> None:
    """Asserts that one state may follow another."""
    assert after in TRANSITIONS[before], f"{what}: {before} -> {after}"


class Residence(StrEnum):
    """Where a feature lies."""

    NONE = "none"
    DEVICE = "device"
    """Where its encoder left it."""
    HOST = "host"
    """In a host buffer of the connector, pinned where there is CUDA."""
