"""The work of CPU workers: read headers, hash, ask less of, decode, preprocess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence, Ticket
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.encode_queue.fair_queue import FairQueue
from fxsplit_encoder.errors import ConnectorError

Digested = tuple[MediaItem, int, bytes]
"""An item, of which less was asked where its request says so, with its tokens and its digest."""

Job = Ticket | tuple[Ticket, Occurrence] | Entry
"""A ticket to count, an item of a ticket to hash, an entry to preprocess."""


class Preparation:
    """Hands out the work of CPU workers, and takes its results."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._inputs = holdings.storage.inputs
        self._turn = 0
        """Which kind of job goes first: else none of a kind was done while others come fast."""

    @property
    def _queues(self) -> tuple[FairQueue[Any], ...]:
        """What there is to do, by kind: nothing more is decoded while what was waits in too many bytes."""
        holdings = self._holdings
        has_room = self._inputs.used < holdings.config.input_bytes
        return holdings.to_count, holdings.to_digest, holdings.to_prepare if has_room else FairQueue()

    @property
    def num_jobs(self) -> int:
        """How many things `take` would hand out."""
        return sum(map(len, self._queues))

    def take(self) -> Job | None:
        """Hand out something to do; None: there is nothing."""
        queues = self._queues
        for kind in range(self._turn, self._turn + len(queues)):
            queue = queues[kind % len(queues)]
            thing: Ticket | Occurrence | Entry | None = queue.first()
            if thing is None:
                continue
            queue.take(thing)
            self._turn = (kind + 1) % len(queues)
            if isinstance(thing, Occurrence):
                return thing.ticket, thing
            if isinstance(thing, Entry):
                thing.is_preparing = True
            return thing
        return None

    def counted(
        self, ticket: Ticket, counts: Sequence[int], error: ConnectorError | None, index: int | None = None
    ) -> None:
        """Take the tokens of each item, 0 if it was not looked at, and why its request may not go on: for an
        item of this index, without which it may go on as text; None: its prompt is wrong.
        """
        if ticket.number not in self._holdings.tickets or ticket.is_counted:
            return  # nobody wants it any more
        for item, count in zip(ticket.items, counts, strict=True):
            item.num_tokens = count
        ticket.is_counted = True
        self._holdings.settled.notify_all()
        left = [item for item in ticket.items if item.state is State.NEW]
        if error is not None and left:
            item = ticket.items[index or 0]
            item = item if item in left else left[0]  # it was cancelled alone, and others are not counted
            self._holdings.fail_item(item, error, may_go_on=index is not None)
            return
        for item in left:
            self._holdings.to_digest.push(item, ticket.number, 1.0, ticket.request.tenant)

    def digested(self, ticket: Ticket, item: Occurrence, result: Digested | ConnectorError) -> None:
        """An item was hashed."""
        if item.state is not State.NEW:
            return  # nobody wants it any more
        if isinstance(result, ConnectorError):
            self._holdings.fail_item(item, result)
            return
        is_reduced = item.is_reducing
        item.media, item.num_tokens, item.digest = result
        if is_reduced:
            ticket.epoch += 1
            self._holdings.stats.reductions += 1
            self._holdings.news[ticket.number] = ticket
        self._holdings.await_memory(ticket)

    def prepared(self, entry: Entry, result: tuple[PreparedItem, float] | ConnectorError) -> None:
        """An item was preprocessed, and is what was announced; with its cost."""
        holdings = self._holdings
        entry.is_preparing = False
        if holdings.storage.entries.get(entry.key) is not entry:
            return  # nobody wants it any more
        if isinstance(result, ConnectorError):
            holdings.fail(entry, result)
            return
        entry.prepared, entry.cost = result
        entry.inputs = self._inputs.take(entry.prepared.num_bytes)
        entry.metadata = entry.prepared.metadata
        entry.queued_at = holdings.clock()
        holdings.enqueue(entry)
