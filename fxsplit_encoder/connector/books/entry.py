"""Occurrences of items in requests, and the features that equal ones share on their way from media to
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxsplit_encoder.connector.books.events import Event
from fxsplit_encoder.connector.seams import MediaItem, PreparedItem
from fxsplit_encoder.connector.states import Residence, State, check_transition
from fxsplit_encoder.errors import ConnectorError


class Occurrence:
    """One item of one request.

    Args:
        ticket: the number of its ticket.
        index: which item of the request.
        media: what is encoded.
        num_tokens: rows.
        num_retries: how often it may be encoded again.
    """

    def __init__(self, ticket: int, index: int, media: MediaItem, num_tokens: int, num_retries: int) -> None:
        self.ticket = ticket
        self.index = index
        self.media = media
        self.num_tokens = num_tokens
        self.retries_left = num_retries
        self.state = State.NEW
        self.num_holds = 1
        self.digest: bytes | None = None
        self.entry: Entry | None = None
        """The feature that it waits for or holds; None before memory is reserved, and once it is let go."""
        self.error: ConnectorError | None = None
        self.is_reducing = False
        """Whether less is about to be asked of it; it has memory of its own until then."""
        self.metadata: Mapping[str, object] = {}

    def __repr__(self) -> str:
        return f"item {self.index} of ticket {self.ticket}"

    def move(self, state: State) -> None:
        """To another state."""
        check_transition(self.state, state, self)
        self.state = state


@dataclass(eq=False)
class Feature:
    """The rows of an item where they lie, and who is reading them."""

    rows: Any
    """A tensor (tokens, width)."""
    residence: Residence
    account: str
    """The ledger's account that they are charged to, under this object."""
    num_reads: int = 0
    """Reads that are being issued."""
    read_events: list[Event] = field(default_factory=list)
    """When those that have been issued are over."""

    @property
    def is_idle(self) -> bool:
        """Whether no read of the rows is issued or running, so that their memory can be reused."""
        self.read_events = [event for event in self.read_events if not event.query()]
        return not self.num_reads and not self.read_events


class Entry:
    """A feature that is being made or kept.

    Args:
        key: what it is called in the cache; None: it is shared with nobody.
        media: what it is made from.
        digest: of the media, as its first item has it.
        num_tokens: rows.
        num_bytes: of all rows.
        flow: whose share of the queues it uses.
    """

    def __init__(
        self, key: bytes | None, media: MediaItem, digest: bytes, num_tokens: int, num_bytes: int, flow: int
    ) -> None:
        self.key = key
        self.media = media
        self.digest = digest
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.flow = flow
        self.state = State.NEW
        self.holders: dict[Occurrence, None] = {}
        """The items that wait for it or hold it."""
        self.keep = False
        """Whether one of those asked for it to be kept when nobody holds it."""
        self.is_preparing = False
        self.prepared: PreparedItem | None = None
        self.metadata: Mapping[str, object] = {}
        self.feature: Feature | None = None
        """Of a READY entry; before that, of one whose rows are on their way."""
        self.cost = 0.0
        self.num_losses = 0
        """How many workers were lost while they had it in hand."""
        self.queued_at = 0.0

    def __repr__(self) -> str:
        return f"Entry({self.media.modality}, {self.num_tokens} tokens, {self.state})"

    @property
    def modality(self) -> str:
        """Of its media."""
        return self.media.modality

    @property
    def residence(self) -> Residence:
        """Where its rows lie."""
        return self.feature.residence if self.feature and self.state is State.READY else Residence.NONE

    @property
    def num_holds(self) -> int:
        """Holds of all its items."""
        return sum(item.num_holds for item in self.holders)

    @property
    def is_wanted(self) -> bool:
        """Whether its rows are of use to anybody, now or later."""
        return bool(self.holders) or self.keep

    def move(self, state: State) -> None:
        """To another state, and with it all items that hold it."""
        check_transition(self.state, state, self)
        self.state = state
        for item in self.holders:
            item.move(state)
