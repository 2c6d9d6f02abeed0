"""Tickets, their items, the features that equal items share from media to rows, and reserved memory."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.request import EncodeRequest, media_bytes
from fxsplit_encoder.connector.states import GONE, TRANSITIONS, WAITING, Availability, Residence, State
from fxsplit_encoder.errors import ConnectorError


class Memory:
    """Bytes of an account, reserved until this object is freed."""

    def __init__(self, account: Account, num_bytes: int) -> None:
        self.account = account
        self.num_bytes = num_bytes
        self.is_freed = False

    def free(self) -> None:
        """Give the bytes back; called once."""
        assert not self.is_freed, f"{self.num_bytes} bytes of {self.account.name} are freed twice"
        self.is_freed = self.account.was_freed = True
        self.account.used -= self.num_bytes


class Account:
    """Bytes that may be reserved, None: any number. Not locked: callers hold the connector's lock."""

    def __init__(self, name: str, limit: int | None) -> None:
        self.name = name
        self.limit = limit
        self.used = self.peak = 0
        self.was_freed = False
        """Whether who waits for bytes may have come to its turn."""

    @property
    def free(self) -> int:
        """Bytes that may still be reserved; without a limit a very large number."""
        return 2**63 if self.limit is None else self.limit - self.used

    def take(self, num_bytes: int) -> Memory:
        """Reserve so many bytes, which are free."""
        assert num_bytes <= self.free, f"{self.name}: {num_bytes} bytes of {self.free}"
        self.used += num_bytes
        self.peak = max(self.peak, self.used)
        return Memory(self, num_bytes)


_SMALLEST = 1 << 12


def capacity_of(num_bytes: int) -> int:
    """Bytes of the buffer for so many: a power of two, as the allocator of pinned memory makes them."""
    return max(_SMALLEST, 1 << (num_bytes - 1).bit_length())


class Event:
    """A point of a device's stream, as `torch.cuda.Event`; this one has passed."""

    def query(self) -> bool:
        """Whether the device has passed it; RuntimeError: the device was lost."""
        return True

    def synchronize(self) -> None:
        """Block until the device has passed it; RuntimeError: the device was lost."""


def has_passed(event: Event, *, if_lost: bool = True) -> bool:
    """Whether a device has passed an event, or is lost, after which nothing uses its memory any more."""
    try:
        return event.query()
    except RuntimeError:
        return if_lost


@dataclass(eq=False)
class Feature:
    """The rows of an item where they lie, and who is reading them."""

    rows: Any
    """A tensor (tokens, width)."""
    residence: Residence
    memory: Memory | None
    num_reads: int = 0
    """Reads that are being issued."""
    read_events: list[Event] = field(default_factory=list)
    """When those that have been issued are over."""

    @property
    def is_idle(self) -> bool:
        """Whether no read of the rows is issued or running, so that their memory can be reused."""
        self.read_events = [event for event in self.read_events if not has_passed(event)]
        return not self.num_reads and not self.read_events


class Stateful:
    """What goes through the states, with host memory of its own on the way."""

    state = State.NEW
    memory: Memory | None = None

    def move(self, state: State) -> None:
        """To another state."""
        assert state in TRANSITIONS[self.state], f"{self}: {self.state} -> {state}"
        self.state = state

    def drop_memory(self) -> None:
        """Free the memory, if it is still there."""
        if self.memory is not None:
            self.memory.free()
            self.memory = None


class Occurrence(Stateful):
    """One item of one request; it has memory while less is asked of it."""

    def __init__(self, ticket: Ticket, index: int, media: MediaItem) -> None:
        self._ticket = weakref.ref(ticket)  # no cycle: with its ticket go its media, at once
        self.index = index
        self.media = media
        self.num_tokens = 0
        """0 before its header was read."""
        self.media_bytes = media_bytes(media.media)
        self.retries_left = ticket.request.failure.retries
        self.num_holds = 1
        self.digest: bytes | None = None
        self.entry: Entry | None = None
        """The feature that it waits for or holds; None before memory is reserved, and once it is let go."""
        self.error: ConnectorError | None = None
        self.metadata: Mapping[str, object] = {}

    @property
    def ticket(self) -> Ticket:
        """Its request's; not to be asked for once that is gone."""
        ticket = self._ticket()
        assert ticket is not None
        return ticket

    @property
    def is_live(self) -> bool:
        """Whether it waits for rows or holds some."""
        return self.state in WAITING or self.state is State.READY

    @property
    def is_undigested(self) -> bool:
        """Whether it is to be hashed before memory is reserved for its ticket."""
        return self.state is State.NEW and self.digest is None

    @property
    def is_reducing(self) -> bool:
        """Whether less is about to be asked of it: until then it has memory of its own."""
        return self.is_undigested and self.memory is not None

    def __repr__(self) -> str:
        return f"item {self.index} of {self._ticket()}"


class Entry(Stateful):
    """A feature that is being made or kept; it has memory until its rows are there: whatever goes wrong
    before, it can be encoded again.
    """

    def __init__(self, key: tuple[bytes, int], item: Occurrence, num_bytes: int) -> None:
        assert item.digest is not None
        self.key = key
        self.modality = item.media.modality
        self.media: MediaItem | None = item.media
        """None: it is encoded."""
        self.digest = item.digest
        self.num_tokens = item.num_tokens
        self.num_bytes = num_bytes
        self.flow, self.tenant = item.ticket.number, item.ticket.request.tenant
        """Those of the first item that asked for it."""
        self.holders: dict[Occurrence, None] = {}
        """The items that wait for it or hold it."""
        self.keep = False
        """Whether one of those asked for it to be kept when nobody holds it."""
        self.is_preparing = False
        self.prepared: PreparedItem | None = None
        self.inputs: Memory | None = None
        """Of what was preprocessed."""
        self.metadata: Mapping[str, object] = {}
        self.feature: Feature | None = None
        """Of a READY entry; before that, of one whose rows are on their way."""
        self.cost = 0.0
        self.num_losses = 0
        """How many workers were lost while they had it in hand."""
        self.queued_at = 0.0

    def __repr__(self) -> str:
        return f"Entry({self.modality}, {self.num_tokens} tokens, {self.state})"

    @property
    def is_wanted(self) -> bool:
        """Whether its rows are of use to anybody, now or later."""
        return bool(self.holders) or self.keep

    def drop_inputs(self) -> None:
        """Free what was preprocessed, if it is still there."""
        if self.inputs is not None:
            self.inputs.free()
            self.prepared = self.inputs = None


class Ticket:
    """The state of one request. Reading it takes no lock; only the connector changes it."""

    def __init__(self, request: EncodeRequest, number: int, settled: threading.Condition, now: float) -> None:
        self.request = request
        self.number = number
        """Unlike the request's id, unique in its connector."""
        self.items = tuple(Occurrence(self, index, media) for index, media in enumerate(request.items))
        self.is_counted = not self.items
        """Whether its token counts are known, so that `token_counts` does not wait."""
        self.epoch = 0
        """Rises whenever token counts change, only before the ticket is first ready."""
        self.told_epoch = 0
        """The last that a step told of."""
        self.text_only = False
        """Whether its media are left out because one of them failed."""
        self.error: ConnectorError | None = None
        """Why it failed."""
        self.submitted_at = now
        self.ready_at: float | None = None
        """When it was ready for the first time, on the monotonic clock."""
        self.is_released = False
        """Of a ticket without media: whether it was released."""
        self.num_overtaken = 0
        """How many later tickets got memory before it."""
        self.waiting = (0, 0)
        """Items that are not ready yet, and bytes of their raw media, as counted last."""
        self.deadline = float("inf")
        self.queue_seconds = 0.0
        """The longest that one of its items waited for an encoder."""
        self.encode_seconds = 0.0
        """The longest that one of its items was in a batch."""
        self._settled = settled
        self.waiters: list[Future[None]] = []
        """Of those that await it, changed with the lock."""

    def __repr__(self) -> str:
        return f"Ticket({self.request.id!r}, {self.state})"

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Rows of each item, exact; waits until headers are read. 0 of text alone, or if it failed before."""
        if not self.is_counted and not self.is_settled:
            with self._settled:
                self._settled.wait_for(lambda: self.is_counted or self.is_settled)
        return tuple(0 if self.text_only else item.num_tokens for item in self.items)

    @property
    def state(self) -> State:
        """That of the item which is furthest behind; items that were cancelled alone do not count."""
        if self.error is not None:
            return State.FAILED
        if self.is_text:
            return State.RELEASED if self.is_released else State.READY
        states = {item.state for item in self.items}
        return next(state for state in State if state in states)

    @property
    def is_text(self) -> bool:
        """Whether it has no media, or goes on without them."""
        return self.text_only or not self.items

    @property
    def availability(self) -> Availability:
        """The ticket's state as an engine needs it in a step."""
        state = self.state
        if state is State.READY:
            return "ready"
        return "deferred" if state in WAITING else "unavailable"

    @property
    def is_settled(self) -> bool:
        """Whether nothing more happens to it unless it is held again."""
        return self.state not in WAITING

    @property
    def without_memory(self) -> list[Occurrence]:
        """The items for which memory has still to be reserved."""
        return [item for item in self.items if item.state is State.NEW and item.entry is None]

    def forget_media(self) -> None:
        """Keep no media of items that are of no use any more."""
        if self.items and all(item.state in GONE for item in self.items):
            for item in self.items:
                item.media = MediaItem(item.media.modality, None, item.media.options)
            self.request = replace(self.request, items=tuple(item.media for item in self.items))

    def residence(self, item: int) -> Residence:
        """Where the rows of one item lie now."""
        entry = self.items[item].entry
        if entry is None or entry.feature is None or entry.state is not State.READY:
            return Residence.NONE
        return entry.feature.residence

    def metadata(self, item: int) -> Mapping[str, object]:
        """Metadata of the rows of one item, such as its grid; empty before it is preprocessed."""
        return self.items[item].metadata

    def wait(self, timeout_s: float | None = None) -> Availability:
        """Blocks until the ticket has settled, or so long; what it then is."""
        with self._settled:
            longest = None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
            self._settled.wait_for(lambda: self.is_settled, longest)
        return self.availability

    def __await__(self) -> Generator[Any, None, Availability]:
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> Availability:
        while True:
            with self._settled:
                if self.is_settled:
                    return self.availability
                self.waiters.append(Future())
                future = self.waiters[-1]
            await asyncio.wrap_future(future)
