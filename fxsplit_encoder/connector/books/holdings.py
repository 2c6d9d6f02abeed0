"""Where features are, which items hold them, news of tickets, and memory for all of a request or none."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from weakref import WeakValueDictionary

from fxsplit_encoder.connector.books.tickets import (
    Account,
    Entry,
    Feature,
    Memory,
    Occurrence,
    Ticket,
    capacity_of,
)
from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.request import ConnectorConfig
from fxsplit_encoder.connector.states import GONE, WAITING, Residence, State
from fxsplit_encoder.connector.statistics import ConnectorStats
from fxsplit_encoder.encode_queue.fair_queue import FairQueue, Shares
from fxsplit_encoder.errors import ConnectorError


class Storage:
    """Entries by key, and the memory of their rows.

    Entries without holders rest, and are evicted least recently used first. Memory that a device may still
    read or write is in quarantine until its events have passed.
    """

    def __init__(self, config: ConnectorConfig, stats: ConnectorStats) -> None:
        self.host = Account("host", config.host_bytes)
        self.inputs = Account("inputs", None)
        """Preprocessed items; `Preparation` bounds them."""
        self.accounts = {account.name: account for account in (self.host, self.inputs)}
        self.entries: dict[tuple[bytes, int], Entry] = {}
        """Every feature that is being made or kept, by name and tokens."""
        self.quarantine: dict[Feature, None] = {}
        """Features that are gone, but that a device may still read or write."""
        self.idle_bytes = 0
        """Of host buffers that were let go since the allocator was last told to give memory back."""
        self._device_bytes = config.device_bytes
        self._stats = stats

    def open(self, name: str, limit: int) -> Account:
        """The account of a name, made with this limit if there is none."""
        return self.accounts.setdefault(name, Account(name, limit))

    # --- the cache

    def add(self, entry: Entry) -> None:
        """From now on others may join."""
        assert entry.key not in self.entries
        self.entries[entry.key] = entry

    def remove(self, entry: Entry) -> None:
        """Take an entry out of the cache, and free what it has."""
        del self.entries[entry.key]
        entry.drop_inputs()
        entry.drop_memory()
        if entry.feature is not None:
            feature, entry.feature = entry.feature, None
            self.free(feature)

    def rest(self, entry: Entry) -> None:
        """Nobody holds a READY entry any more, and it was used last."""
        self.entries[entry.key] = self.entries.pop(entry.key)
        self.host.was_freed = True

    @property
    def resting(self) -> list[Entry]:
        """Features that are there without holders, least recently used first."""
        return [each for each in self.entries.values() if each.state is State.READY and not each.holders]

    # --- memory

    def reserve(self, sizes: Sequence[int], spared: Collection[Entry] = ()) -> list[Memory] | None:
        """Host memory for rows of so many bytes each, or None: there is none, or not yet."""
        self.settle()
        capacities = [capacity_of(size) for size in sizes]
        if not self._make_room(self.host, sum(capacities), spared):
            return None
        return [self.host.take(capacity) for capacity in capacities]

    def claim_device(self, device: str, num_bytes: int) -> Memory | None:
        """Room for rows where their encoder left them; None if there is none."""
        account = self.open(f"device {device}", self._device_bytes)
        self.settle()
        return account.take(num_bytes) if self._make_room(account, num_bytes) else None

    def _make_room(self, account: Account, num_bytes: int, spared: Collection[Entry] = ()) -> bool:
        """Evict so that so many bytes are free, or evict nothing if they cannot be. Of rows that a device
        still reads they are free later, which the account tells then.
        """
        missing = num_bytes - account.free
        chosen = []
        for entry in sorted(self.resting, key=_is_busy) if missing > 0 else ():
            feature = entry.feature
            assert feature is not None and feature.memory is not None
            if missing > 0 and feature.memory.account is account and entry not in spared:
                chosen.append(entry)
                missing -= feature.memory.num_bytes
        if missing > 0:
            return False
        for entry in chosen:
            assert entry.feature is not None and entry.feature.memory is not None
            self._stats.evictions += 1
            self._stats.evicted_bytes += entry.feature.memory.num_bytes
            entry.move(State.RELEASED)
            self.remove(entry)
        return num_bytes <= account.free

    def free(self, feature: Feature) -> None:
        """Free rows that are not found any more, now or once no device uses them."""
        self.quarantine[feature] = None
        self.settle()

    def settle(self) -> None:
        """Free what is in quarantine and not in use any more."""
        for feature in [feature for feature in self.quarantine if feature.is_idle]:
            del self.quarantine[feature]
            feature.rows = None
            if feature.memory is not None:
                feature.memory.free()
                self.idle_bytes += feature.memory.num_bytes if feature.residence is Residence.HOST else 0


def _is_busy(entry: Entry) -> bool:
    return entry.feature is not None and not entry.feature.is_idle


class Holdings:
    """Tickets, features and the queues that they wait in; ties items to entries and unties them.

    Args:
        row_bytes: of a feature's rows; None: no encoder takes the modality.
        settled: over the lock; notified whenever a ticket has settled.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        row_bytes: Callable[[Modality], int | None],
        settled: threading.Condition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.row_bytes, self.settled, self.clock = config, row_bytes, settled, clock
        self.stats = ConnectorStats(max_batch_items=config.max_batch_items)
        self.storage = Storage(config, self.stats)
        self.tickets: dict[int, Ticket] = {}
        """Those that wait for something or hold something, by number."""
        self.unsettled: dict[Ticket, None] = {}
        """Those of them that are not ready yet, as a step was told."""
        self.to_count: FairQueue[Ticket] = FairQueue()
        """Those whose media's headers are to be read."""
        self.to_digest: FairQueue[Occurrence] = FairQueue()
        """Also items of which less is to be asked, which are hashed again."""
        self.to_prepare: FairQueue[Entry] = FairQueue()
        self.to_encode: FairQueue[Entry] = FairQueue()
        self.to_admit: FairQueue[Ticket] = FairQueue()
        """Tickets that wait for memory."""
        self.news: WeakValueDictionary[int, Ticket] = WeakValueDictionary()
        """Tickets that have settled or ended, or whose token counts are new, since a step last told of them,
        by number. Weak: whoever awaits tickets and never asks for a step does not keep them alive."""
        self.woken: list[Future[None]] = []
        """Of those that await tickets which have settled."""
        self.waiting = Shares()
        """Items that are not ready yet."""
        self.media = Shares()
        """Bytes of their raw media."""
        self._changed: dict[Ticket, None] = {}
        """Tickets whose items have changed since `settle`."""

    # --- entries

    def attach(self, item: Occurrence, entry: Entry) -> None:
        """The item waits for this feature from now on, or holds it if it is ready."""
        assert item.entry is None
        item.entry = entry
        entry.holders[item] = None
        if item.state is not entry.state:
            item.move(entry.state)
        if entry.state is State.READY:
            item.metadata = entry.metadata
        if item.ticket.request.retention == "keep":
            entry.keep = True
        self.touch(item.ticket)

    def detach(self, item: Occurrence, state: State) -> None:
        """The item lets go of its feature, if it has one, and is in this state from now on."""
        entry, item.entry = item.entry, None
        ticket = item.ticket
        item.num_holds = 0
        was_undigested = item.is_undigested
        item.move(state)
        if was_undigested:
            self.await_memory(ticket)
        self.to_digest.discard(item)
        item.drop_memory()
        if entry is not None:
            del entry.holders[item]
            if not entry.holders:
                self._abandon(entry)
        if not ticket.without_memory:
            self.to_admit.discard(ticket)
        self.touch(ticket)

    def _abandon(self, entry: Entry) -> None:
        """Nobody waits for or holds the entry any more. What is in a batch finishes."""
        if entry.state is not State.READY:
            if entry.state is not State.ENCODING:
                self.drop(entry, State.CANCELLED)
        elif entry.keep:
            self.storage.rest(entry)
        else:
            self.drop(entry, State.RELEASED)

    def move(self, entry: Entry, state: State) -> None:
        """An entry and all its items change their state."""
        entry.move(state)
        for item in entry.holders:
            item.move(state)
            self.touch(item.ticket)

    def drop(self, entry: Entry, state: State) -> None:
        """Remove an entry without holders and free its memory."""
        assert not entry.holders
        entry.move(state)
        self.to_prepare.discard(entry)
        self.to_encode.discard(entry)
        self.storage.remove(entry)

    # --- failures

    def fail(self, entry: Entry, error: ConnectorError, *, may_retry: bool = True) -> None:
        """An entry could not be made: it is tried again for the items whose requests ask for that."""
        may_retry = may_retry and error.retryable
        leaving = [item for item in entry.holders if not (may_retry and item.retries_left)]
        for item in leaving:
            del entry.holders[item]
            item.entry = None
        reducing = [item for item in leaving if self._may_reduce(item, error) and self._inherit(item, entry)]
        if entry.holders:
            for item in entry.holders:
                item.retries_left -= 1
            self.stats.retries += 1
            self.enqueue(entry, is_first=True)
        else:
            self.drop(entry, State.FAILED)
        for item in reducing:
            self._reduce(item)
        for item in leaving:
            if item not in reducing and item.state in WAITING:  # else it went with another item of its ticket
                self.fail_item(item, error)

    def enqueue(self, entry: Entry, *, is_first: bool = False) -> None:
        """An entry waits for what it needs next."""
        assert entry.feature is None
        if entry.prepared is None:
            assert entry.state is State.NEW
            self.to_prepare.push(entry, entry.flow, entry.num_tokens, entry.tenant, is_first=is_first)
        else:
            if entry.state is not State.QUEUED:
                self.move(entry, State.QUEUED)
            self.to_encode.push(entry, entry.flow, entry.cost, entry.tenant, is_first=is_first)

    def fail_item(self, item: Occurrence, error: ConnectorError, *, may_go_on: bool = True) -> None:
        """An item fails, and its request goes on as text or not, as it asked, if it may."""
        ticket = item.ticket
        request = ticket.request
        name = f"item {item.index} of request {request.id} ({item.media.modality}, {item.num_tokens} tokens)"
        failure = type(error)(f"{name}: {error}", error.kind, error.retryable)
        item.error = failure
        self.stats.failures[error.kind] += 1
        if may_go_on and request.failure.then == "text_only" and ticket.ready_at is None:
            ticket.text_only = True
            ticket.epoch += 1
            self.stats.text_only += 1
        else:
            ticket.error = failure
        self.detach(item, State.FAILED)
        for other in ticket.items:
            if other.is_live:
                self.detach(other, State.CANCELLED)

    # --- asking less of an item

    def _may_reduce(self, item: Occurrence, error: ConnectorError) -> bool:
        asked = item.ticket.request.failure.reduce is not None
        return asked and error.kind == "out_of_memory" and item.ticket.ready_at is None

    def _inherit(self, item: Occurrence, entry: Entry) -> bool:
        """Reserve memory for an item that leaves its entry; it must not wait: its ticket may hold some."""
        if not entry.holders and entry.memory is not None:
            item.memory, entry.memory = entry.memory, None
        elif (reserved := self.storage.reserve([entry.num_bytes])) is not None:
            (item.memory,) = reserved
        return item.memory is not None

    def _reduce(self, item: Occurrence) -> None:
        item.digest = None
        if item.state is not State.NEW:
            item.move(State.NEW)
        tenant = item.ticket.request.tenant
        self.to_digest.push(item, item.ticket.number, 1.0, tenant, is_first=True)
        self.touch(item.ticket)

    # --- tickets

    def touch(self, ticket: Ticket) -> None:
        """Note that a ticket has changed, which is known or is from now on."""
        self.tickets[ticket.number] = ticket
        self._changed[ticket] = None

    def await_memory(self, ticket: Ticket) -> None:
        """A ticket waits until there is memory for all of its items that have none, once all are hashed."""
        if any(item.is_undigested for item in ticket.items):
            return
        if ticket not in self.to_admit:
            self.to_admit.push(ticket, None, 1.0, ticket.request.tenant)
        self.storage.host.was_freed = True

    def settle(self) -> None:
        """At the end of every change: tell what became of the tickets that it concerns."""
        for ticket in self._changed:
            self._count_waiting(ticket)
            if not ticket.is_settled:
                self.unsettled[ticket] = None
            elif ticket in self.unsettled:
                del self.unsettled[ticket]
                self._tell(ticket)
            if ticket.state in GONE or ticket.state is State.RELEASED:
                del self.tickets[ticket.number]
                self.stats.outcomes[ticket.state] += 1
                self.news[ticket.number] = ticket
                self.to_count.discard(ticket)
        self._changed.clear()

    def _count_waiting(self, ticket: Ticket) -> None:
        """Count the items that are not ready yet, and their raw media, which others are not kept for."""
        waiting = [item.media_bytes for item in ticket.items if item.state in WAITING]
        before, ticket.waiting = ticket.waiting, (len(waiting), sum(waiting))
        self.waiting.change(ticket.request.tenant, ticket.waiting[0] - before[0])
        self.media.change(ticket.request.tenant, ticket.waiting[1] - before[1])
        ticket.forget_media()

    def _tell(self, ticket: Ticket) -> None:
        if ticket.state is State.READY and ticket.ready_at is None:
            ticket.ready_at = self.clock()
            self.stats.ready.add(ticket.ready_at - ticket.submitted_at)
        self.news[ticket.number] = ticket
        self.woken += ticket.waiters
        ticket.waiters = []
        self.settled.notify_all()


_MOST_LOOKED_AT = 16
"""Tickets of a tenant that may find too little memory before its others are not tried."""


class Admission:
    """Lets requests in whose items are hashed; `key_of` names a feature by digest and salt."""

    max_overtakes = 64
    """Requests that may get memory before one that came earlier and needs more than is free."""

    def __init__(self, holdings: Holdings, key_of: Callable[[bytes, str], bytes]) -> None:
        self._holdings = holdings
        self._storage = holdings.storage
        self._key_of = key_of

    def run(self) -> None:
        """Lets in whom memory suffices for, tenants in turn."""
        while self._storage.host.was_freed:  # whom is let in may fail others, which frees memory
            self._storage.host.was_freed = False
            blocked: dict[str, list[Ticket]] = {}
            for ticket in list(self._holdings.to_admit):
                own = blocked.setdefault(ticket.request.tenant, [])
                if len(own) >= _MOST_LOOKED_AT:
                    continue
                if not self.admit(ticket, ticket.without_memory):
                    own.append(ticket)
                else:
                    if ticket in self._holdings.to_admit:  # else it has failed
                        self._holdings.to_admit.take(ticket)
                    for earlier in itertools.chain(*blocked.values()):
                        earlier.num_overtaken += 1
                if any(each.num_overtaken >= self.max_overtakes for each in own):
                    break  # nobody may overtake it any more

    def admit(self, ticket: Ticket, items: Sequence[Occurrence]) -> bool:
        """Find, join or reserve memory for all of these items, or for none: then nothing changes."""
        sharing: dict[Entry, list[Occurrence]] = {}
        new: dict[tuple[bytes, int], Entry] = {}
        for item in items:
            assert item.digest is not None
            # Rows of another size are another feature: so a request needs no more memory than was checked.
            key = (self._key_of(item.digest, ticket.request.salt), item.num_tokens)
            entry = self._storage.entries.get(key) or new.get(key)
            if entry is None:
                row_bytes = self._holdings.row_bytes(item.media.modality)
                assert row_bytes is not None  # checked when it was counted
                entry = new[key] = Entry(key, item, row_bytes * item.num_tokens)
            sharing.setdefault(entry, []).append(item)
        # A new feature takes over what one of its items has of its own.
        heirs = {entry: item for entry in new.values() for item in sharing[entry] if item.memory is not None}
        needing = [entry for entry in new.values() if entry not in heirs]
        reserved = self._storage.reserve([entry.num_bytes for entry in needing], spared=sharing)
        if reserved is None:
            return False
        for entry, memory in zip(needing, reserved, strict=True):
            entry.memory = memory
        for entry, item in heirs.items():
            entry.memory, item.memory = item.memory, None
        for entry in new.values():
            self._storage.add(entry)
            self._holdings.enqueue(entry)
        for entry, own in sharing.items():
            self._let_in(entry, own, is_new=entry.key in new)
        return True

    def _let_in(self, entry: Entry, items: Sequence[Occurrence], *, is_new: bool) -> None:
        stats = self._holdings.stats
        stats.misses += is_new
        if entry.state is State.READY:
            stats.hits += len(items)
        else:
            stats.joins += len(items) - is_new
        for item in items:
            item.drop_memory()
            self._holdings.attach(item, entry)
