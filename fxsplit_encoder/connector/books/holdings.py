"""Who holds which feature, and memory for all items of a request at once or for none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxsplit_encoder.connector.books.parts import INPUTS, MEDIA, Parts
from fxsplit_encoder.connector.books.storage import HOST
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence, Ticket
from fxsplit_encoder.connector.states import GONE, WAITING, State
from fxsplit_encoder.encode_queue.fair_queue import FIRST
from fxsplit_encoder.errors import ConnectorError


class Holdings:
    """Ties items to entries and unties them; tells tickets what became of them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # --- entries

    def attach(self, item: Occurrence, entry: Entry) -> None:
        """The item waits for this feature from now on, or holds it if it is ready."""
        assert item.entry is None
        item.entry = entry
        entry.holders[item] = None
        self._parts.cache.wake(entry)
        if item.state is not entry.state:
            item.move(entry.state)
        if entry.state is State.READY:
            item.metadata = entry.metadata
        if self._ticket(item).request.retention == "keep" and entry.key is not None:
            entry.keep = True
        self.touch([item])

    def detach(self, item: Occurrence, state: State) -> None:
        """The item lets go of its feature, if it has one, and is in this state from now on."""
        entry, item.entry = item.entry, None
        item.num_holds = 0
        if item.digest is None and item.state is State.NEW:
            self.count_digested(self._ticket(item))
        item.move(state)
        self._parts.to_digest.discard(item)
        self._free_reserved(item)
        if entry is not None:
            del entry.holders[item]
            if not entry.holders:
                self._abandon(entry)
        if (ticket := self._parts.tickets.get(item.ticket)) is not None and not ticket.without_memory:
            self._parts.to_admit.pop(ticket.number, None)
        self.touch([item])

    def _abandon(self, entry: Entry) -> None:
        """Nobody waits for or holds the entry any more. What is in a batch finishes."""
        if entry.state is State.READY:
            if entry.keep:
                self._parts.cache.rest(entry)
                self._parts.storage.was_freed = True
            else:
                self.drop(entry, State.RELEASED)
        elif entry.state is not State.ENCODING:
            self.drop(entry, State.CANCELLED)

    def move(self, entry: Entry, state: State) -> None:
        """An entry and all its items change their state."""
        entry.move(state)
        self.touch(entry.holders)

    def drop(self, entry: Entry, state: State) -> None:
        """Remove an entry without holders and free its memory."""
        assert not entry.holders
        entry.move(state)
        parts = self._parts
        parts.cache.remove(entry)
        parts.to_prepare.discard(entry)
        parts.to_encode.discard(entry)
        self.drop_inputs(entry)
        parts.storage.drop_feature(entry)
        parts.ledger.release(HOST, entry)
        parts.storage.was_freed = True

    def drop_inputs(self, entry: Entry) -> None:
        """Free what was preprocessed, if it is still there."""
        if entry.prepared is not None:
            entry.prepared = None
            self._parts.ledger.release(INPUTS, entry)

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
            self._parts.stats.retries += 1
            self.requeue(entry)
        else:
            self.drop(entry, State.FAILED)
        for item in reducing:
            self._reduce(item)
        for item in leaving:
            if item not in reducing and item.state in WAITING:  # else it went with another item of its ticket
                self.fail_item(item, error)

    def requeue(self, entry: Entry) -> None:
        """An entry goes back to where its work begins, ahead of others."""
        parts = self._parts
        assert entry.feature is None
        if entry.prepared is None:
            assert entry.state is State.NEW
            parts.to_prepare.push(entry, entry.flow, entry.num_tokens, entry.tenant, priority=FIRST)
        else:
            if entry.state is not State.QUEUED:
                self.move(entry, State.QUEUED)
            parts.to_encode.push(entry, entry.flow, entry.cost, entry.tenant, priority=FIRST)

    def fail_item(self, item: Occurrence, error: ConnectorError, *, may_go_on: bool = True) -> None:
        """An item fails, and its request goes on as text or not, as it asked, if it may."""
        ticket = self._ticket(item)
        failure = type(error)(f"{self._name(item)}: {error}", error.kind, error.retryable)
        item.error = failure
        self._parts.stats.failures[error.kind] += 1
        if may_go_on and ticket.request.failure.then == "text_only" and ticket.ready_at is None:
            ticket.text_only = True
            ticket.epoch += 1
            self._parts.stats.text_only += 1
        else:
            ticket.error = failure
        self.detach(item, State.FAILED)
        self.give_up(ticket)

    def give_up(self, ticket: Ticket) -> None:
        """Every item that its ticket waits for or holds lets go."""
        for item in ticket.items:
            if item.state in WAITING or item.state is State.READY:
                self.detach(item, State.CANCELLED)
        self._parts.changed[ticket.number] = ticket

    # --- asking less of an item

    def _may_reduce(self, item: Occurrence, error: ConnectorError) -> bool:
        ticket = self._ticket(item)
        asked = ticket.request.failure.reduce is not None and self._parts.can_reduce
        return asked and error.kind == "out_of_memory" and ticket.ready_at is None

    def _inherit(self, item: Occurrence, entry: Entry) -> bool:
        """Memory of its own for an item that leaves its entry. It must not wait for any, since other items of
        its ticket may hold some.
        """
        storage = self._parts.storage
        if not entry.holders and self._parts.ledger.owned(HOST, entry):
            self._parts.ledger.move(HOST, entry, item)
            return True
        return storage.reserve([(item, entry.num_bytes)])

    def _reduce(self, item: Occurrence) -> None:
        item.digest = None
        item.is_reducing = True
        if item.state is not State.NEW:
            item.move(State.NEW)
        self._ticket(item).num_undigested += 1
        self._parts.to_digest.push(item, item.ticket, 1.0, self._ticket(item).request.tenant, priority=FIRST)
        self.touch([item])

    def _free_reserved(self, item: Occurrence) -> None:
        if self._parts.ledger.release(HOST, item):
            self._parts.storage.was_freed = True

    # --- tickets

    def touch(self, items: Iterable[Occurrence]) -> None:
        """Note that some items have changed, and with them their tickets."""
        for item in items:
            if (ticket := self._parts.tickets.get(item.ticket)) is not None:
                self._parts.changed[ticket.number] = ticket

    def count_digested(self, ticket: Ticket) -> None:
        """One item less of a ticket is to be hashed before memory is reserved."""
        ticket.num_undigested -= 1
        if not ticket.num_undigested:
            self._parts.to_admit[ticket.number] = ticket
            self._parts.storage.was_freed = True

    def settle(self) -> None:
        """At the end of every change: tell what became of the tickets that it concerns."""
        parts = self._parts
        for ticket in parts.changed.values():
            self._count_waiting(ticket)
            if ticket.is_settled and not ticket.was_settled:
                self._tell(ticket)
            ticket.was_settled = ticket.is_settled
            if ticket.was_settled:
                parts.unsettled.pop(ticket.number, None)
            else:
                parts.unsettled[ticket.number] = ticket
            if ticket.state in GONE or ticket.state is State.RELEASED:
                del parts.tickets[ticket.number]
                parts.stats.outcomes[ticket.state] += 1
                parts.news[ticket.number] = ticket
                parts.to_count.discard(ticket)
        parts.changed.clear()

    def _count_waiting(self, ticket: Ticket) -> None:
        """Count the items that are not ready yet, and their raw media, which others are not kept for."""
        parts, tenant = self._parts, ticket.request.tenant
        waiting = [item for item in ticket.items if item.state in WAITING]
        parts.waiting.change(tenant, len(waiting) - ticket.num_waiting)
        ticket.num_waiting = len(waiting)
        for item in ticket.items:
            wanted = item.media_bytes if item.state in WAITING else 0
            missing = wanted - parts.ledger.owned(MEDIA, item)
            if missing > 0:
                parts.ledger.reserve(MEDIA, item, missing)
            elif missing < 0:
                parts.ledger.release(MEDIA, item, -missing)
            parts.media.change(tenant, missing)
        ticket.forget_media()

    def _tell(self, ticket: Ticket) -> None:
        parts = self._parts
        if ticket.state is State.READY and ticket.ready_at is None:
            ticket.ready_at = parts.clock()
            parts.stats.ready.add(ticket.ready_at - ticket.submitted_at)
        parts.news[ticket.number] = ticket
        parts.woken.append(ticket)
        parts.settled.notify_all()

    def _ticket(self, item: Occurrence) -> Ticket:
        return self._parts.tickets[item.ticket]

    def _name(self, item: Occurrence) -> str:
        request = self._ticket(item).request.id
        return f"item {item.index} of request {request} ({item.media.modality}, {item.num_tokens} tokens)"


_MOST_LOOKED_AT = 16


@dataclass
class _Group:
    """Equal items of a request, and the feature that they will share."""

    entry: Entry
    items: list[Occurrence]
    is_new: bool
    is_rejected: bool = False
    """Whether there are rows of the same name, but not as many."""

    def inheritance(self, parts: Parts) -> Occurrence | None:
        """The item whose own memory a new feature takes over, if one has some."""
        owners = (item for item in self.items if parts.ledger.owned(HOST, item))
        return next(owners, None) if self.is_new else None


class Admission:
    """Lets requests in whose items are hashed."""

    def __init__(self, parts: Parts, holdings: Holdings) -> None:
        self._parts = parts
        self._holdings = holdings

    def run(self) -> None:
        """Lets in whom memory suffices for, in order."""
        parts = self._parts
        while parts.storage.was_freed:  # whom is let in may fail others, which frees memory
            parts.storage.was_freed = False
            blocked: dict[str, list[Ticket]] = {}
            for ticket in self._in_turn():
                tenant = ticket.request.tenant
                own = blocked.setdefault(tenant, [])
                if len(own) >= _MOST_LOOKED_AT:
                    continue
                if not self.admit(ticket, ticket.without_memory):
                    own.append(ticket)
                else:
                    parts.to_admit.pop(ticket.number, None)
                    parts.turns[tenant] = max(parts.turns.values(), default=0) + 1
                    for earlier in itertools.chain(*blocked.values()):
                        earlier.num_overtaken += 1
                if any(each.num_overtaken >= parts.max_overtakes for each in own):
                    break  # nobody may overtake it any more

    def _in_turn(self) -> list[Ticket]:
        """Those that wait for memory: of each tenant the first, then the second, and so on."""
        by_tenant: dict[str, list[Ticket]] = {}
        for ticket in self._parts.to_admit.values():
            by_tenant.setdefault(ticket.request.tenant, []).append(ticket)
        turns = self._parts.turns = {name: self._parts.turns.get(name, 0) for name in by_tenant}
        rounds = itertools.zip_longest(
            *(by_tenant[name] for name in sorted(by_tenant, key=turns.__getitem__))
        )
        return [ticket for each in rounds for ticket in each if ticket is not None]

    def admit(self, ticket: Ticket, items: Sequence[Occurrence]) -> bool:
        """Finds, joins or reserves memory for all of these items of a ticket, or for none: then nothing
        changes.
        """
        parts = self._parts
        groups = self._groups(ticket, items)
        found = {group.entry for group in groups if not group.is_new}
        needs = [
            (group.entry, group.entry.num_bytes)
            for group in groups
            if group.is_new and group.inheritance(parts) is None
        ]
        if not parts.storage.reserve(needs, spared=found):
            return False
        for group in groups:
            self._let_in(ticket, group)
        return True

    def _groups(self, ticket: Ticket, items: Sequence[Occurrence]) -> list[_Group]:
        """Items of one key and size share a feature, also where the key belongs to rows of another size: so a
        request never needs more memory than its distinct items, which was checked when it was submitted.
        """
        groups: dict[tuple[bytes, int], _Group] = {}
        taken: set[bytes] = set()  # keys that rows of some size have, in the cache or in this request
        for item in items:
            assert item.digest is not None
            key = self._parts.key_of(item.digest, ticket.request.salt)
            if (group := groups.get((key, item.num_tokens))) is not None:
                group.items.append(item)
                continue
            found = self._parts.cache.find(key)
            if found is not None and found.num_tokens == item.num_tokens:
                group = _Group(found, [item], is_new=False)
            else:
                own_key = None if found is not None or key in taken else key
                new = self._new_entry(item, own_key)
                group = _Group(new, [item], is_new=True, is_rejected=found is not None)
            groups[key, item.num_tokens] = group
            taken.add(key)
        return list(groups.values())

    def _new_entry(self, item: Occurrence, key: bytes | None) -> Entry:
        row_bytes = self._parts.row_bytes(item.media.modality)
        assert row_bytes is not None  # checked when it was counted
        num_bytes = row_bytes * item.num_tokens
        return Entry(key, item, num_bytes, self._parts.tickets[item.ticket].request.tenant)

    def _let_in(self, ticket: Ticket, group: _Group) -> None:
        parts, entry = self._parts, group.entry
        if (heir := group.inheritance(parts)) is not None:
            parts.ledger.move(HOST, heir, entry)
        for item in group.items:
            parts.ledger.release(HOST, item)
        if group.is_new:
            parts.stats.misses += 1
            parts.stats.rejected_hits += group.is_rejected
            parts.cache.add(entry)
            parts.to_prepare.push(entry, entry.flow, entry.num_tokens, entry.tenant)
            ticket.num_hits += len(group.items) - 1
        else:
            ticket.num_hits += len(group.items)
        if entry.state is State.READY:
            parts.stats.hits += len(group.items)
        else:
            parts.stats.joins += len(group.items) - group.is_new
        for item in group.items:
            self._holdings.attach(item, entry)
