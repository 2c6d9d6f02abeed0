"""Which requests get memory: all items of a request at once, or none of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence, Ticket
from fxsplit_encoder.connector.states import State

_MOST_LOOKED_AT = 16
"""Tickets of a tenant that may find too little memory before its others are not tried."""

MOST_OVERTAKES = 64
"""Requests that may get memory before one that came earlier and needs more than is free."""


@dataclass
class _Group:
    """Equal items of a request, and the feature that they will share."""

    entry: Entry
    items: list[Occurrence]
    is_new: bool
    is_rejected: bool = False
    """Whether there are rows of the same name, but not as many."""

    @property
    def heir(self) -> Occurrence | None:
        """The item whose own memory a new feature takes over, if one has some."""
        return next((item for item in self.items if self.is_new and item.memory is not None), None)


class Admission:
    """Lets requests in whose items are hashed.

    Args:
        holdings: what they get features and memory of.
        key_of: the name of a feature, from its item's digest and the salt.
        max_overtakes: see `MOST_OVERTAKES`.
    """

    def __init__(
        self, holdings: Holdings, key_of: Callable[[bytes, str], bytes], max_overtakes: int = MOST_OVERTAKES
    ) -> None:
        self._holdings = holdings
        self._storage = holdings.storage
        self._key_of = key_of
        self._max_overtakes = max_overtakes
        self._turns: dict[str, int] = {}
        """By tenant that waits for memory, when it last got some."""

    def run(self) -> None:
        """Lets in whom memory suffices for, in order."""
        while self._storage.was_freed:  # whom is let in may fail others, which frees memory
            self._storage.was_freed = False
            blocked: dict[str, list[Ticket]] = {}
            for ticket in self._in_turn():
                tenant = ticket.request.tenant
                own = blocked.setdefault(tenant, [])
                if len(own) >= _MOST_LOOKED_AT:
                    continue
                if not self.admit(ticket, ticket.without_memory):
                    own.append(ticket)
                else:
                    self._holdings.to_admit.pop(ticket, None)
                    self._turns[tenant] = max(self._turns.values(), default=0) + 1
                    for earlier in itertools.chain(*blocked.values()):
                        earlier.num_overtaken += 1
                if any(each.num_overtaken >= self._max_overtakes for each in own):
                    break  # nobody may overtake it any more

    def _in_turn(self) -> list[Ticket]:
        """Those that wait for memory: of each tenant the first, then the second, and so on."""
        by_tenant: dict[str, list[Ticket]] = {}
        for ticket in self._holdings.to_admit:
            by_tenant.setdefault(ticket.request.tenant, []).append(ticket)
        turns = self._turns = {name: self._turns.get(name, 0) for name in by_tenant}
        order = sorted(by_tenant, key=turns.__getitem__)
        rounds = itertools.zip_longest(*(by_tenant[name] for name in order))
        return [ticket for each in rounds for ticket in each if ticket is not None]

    def admit(self, ticket: Ticket, items: Sequence[Occurrence]) -> bool:
        """Finds, joins or reserves memory for all of these items of a ticket, or for none: then nothing
        changes.
        """
        groups = self._groups(ticket, items)
        found = {group.entry for group in groups if not group.is_new}
        needing = [group.entry for group in groups if group.is_new and group.heir is None]
        reserved = self._storage.reserve([entry.num_bytes for entry in needing], spared=found)
        if reserved is None:
            return False
        for entry, memory in zip(needing, reserved, strict=True):
            entry.memory = memory
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
            key = self._key_of(item.digest, ticket.request.salt)
            if (group := groups.get((key, item.num_tokens))) is not None:
                group.items.append(item)
                continue
            found = self._storage.by_key.get(key)
            if found is not None and found.num_tokens == item.num_tokens:
                group = _Group(found, [item], is_new=False)
            else:
                own_key = None if found is not None or key in taken else key
                row_bytes = self._holdings.row_bytes(item.media.modality)
                assert row_bytes is not None  # checked when it was counted
                new = Entry(own_key, item, row_bytes * item.num_tokens)
                group = _Group(new, [item], is_new=True, is_rejected=found is not None)
            groups[key, item.num_tokens] = group
            taken.add(key)
        return list(groups.values())

    def _let_in(self, ticket: Ticket, group: _Group) -> None:
        entry, stats = group.entry, self._holdings.stats
        if (heir := group.heir) is not None:
            entry.memory, heir.memory = heir.memory, None
        if group.is_new:
            stats.misses += 1
            stats.rejected_hits += group.is_rejected
            self._storage.add(entry)
            self._holdings.to_prepare.push(entry, entry.flow, entry.num_tokens, entry.tenant)
        ticket.num_hits += len(group.items) - group.is_new
        if entry.state is State.READY:
            stats.hits += len(group.items)
        else:
            stats.joins += len(group.items) - group.is_new
        for item in group.items:
            self._holdings.drop_memory(item)
            self._holdings.attach(item, entry)
