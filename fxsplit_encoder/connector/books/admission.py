"""Memory for a whole request at once, or for none of it.

A request that had memory for some of its items and waited for more could wait for ever, for another one that
does the same. So all its features are found, joined or reserved in one step, in the order of submission;
smaller requests may overtake one that does not fit yet, and only so often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxsplit_encoder.connector.books.entry import Entry, Occurrence
from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.host_buffers import HOST
from fxsplit_encoder.connector.books.parts import Parts
from fxsplit_encoder.connector.books.ticket import Ticket
from fxsplit_encoder.connector.states import State

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
        """The item whose own memory the feature takes over; None: it needs some, or has it."""
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
            blocked: list[Ticket] = []
            for ticket in list(parts.to_admit.values()):
                if self.admit(ticket, _waiting(ticket)):
                    parts.to_admit.pop(ticket.number, None)
                    for earlier in blocked:
                        earlier.num_overtaken += 1
                else:
                    blocked.append(ticket)
                if _is_barred(blocked, parts.config.max_overtakes):
                    break

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
        groups: dict[bytes | Occurrence, _Group] = {}
        for item in items:
            assert item.digest is not None
            key = self._parts.key_of(item.digest, ticket.request.salt)
            entry = self._parts.cache.find(key)
            if entry is not None and entry.num_tokens != item.num_tokens:
                groups[item] = _Group(self._new_entry(item, None), [item], is_new=True, is_rejected=True)
            elif key in groups and groups[key].entry.num_tokens == item.num_tokens:
                groups[key].items.append(item)
            elif entry is not None:
                groups[key] = _Group(entry, [item], is_new=False)
            else:
                own_key = None if key in groups else key
                groups[own_key or item] = _Group(self._new_entry(item, own_key), [item], is_new=True)
        return list(groups.values())

    def _new_entry(self, item: Occurrence, key: bytes | None) -> Entry:
        row_bytes = self._parts.row_bytes(item.media.modality)
        assert row_bytes is not None and item.digest is not None  # checked at submission
        num_bytes = row_bytes * item.num_tokens
        return Entry(key, item.media, item.digest, item.num_tokens, num_bytes, flow=item.ticket)

    def _let_in(self, ticket: Ticket, group: _Group) -> None:
        parts, entry = self._parts, group.entry
        if (heir := group.inheritance(parts)) is not None:
            parts.storage.buffers.move(heir, entry)
        for item in group.items:
            if parts.ledger.owned(HOST, item):
                parts.storage.buffers.release(item)
        if group.is_new:
            parts.stats.misses += 1
            parts.stats.rejected_hits += group.is_rejected
            parts.cache.add(entry)
            parts.to_prepare.push(entry, entry.flow, entry.num_tokens)
            ticket.num_hits += len(group.items) - 1
        else:
            ticket.num_hits += len(group.items)
        if entry.state is State.READY:
            parts.stats.hits += len(group.items)
        else:
            parts.stats.joins += len(group.items) - group.is_new
        for item in group.items:
            self._holdings.attach(item, entry)


def _waiting(ticket: Ticket) -> list[Occurrence]:
    """The items of a ticket that need memory."""
    return [item for item in ticket.items if item.state is State.NEW and item.entry is None]


def _is_barred(blocked: Iterable[Ticket], max_overtakes: int) -> bool:
    """Whether nobody may overtake those that have no memory yet."""
    blocked = list(blocked)
    return len(blocked) >= _MOST_LOOKED_AT or any(each.num_overtaken >= max_overtakes for each in blocked)
