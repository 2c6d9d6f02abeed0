"""The work of CPU workers: read headers, hash, ask less of, decode, preprocess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence, Ticket
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem, Reduction
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.encode_queue.fair_queue import FairQueue
from fxsplit_encoder.errors import ConnectorError


class DigestJob(NamedTuple):
    """Hash an item, after having asked less of it if `reduction` says so."""

    ticket: Ticket
    item: Occurrence
    media: MediaItem
    reduction: Reduction | None


class Digested(NamedTuple):
    """Result of a `DigestJob`."""

    media: MediaItem
    num_tokens: int
    digest: bytes


class Problem(NamedTuple):
    """Why a request cannot be served, known before anything is hashed."""

    item: int
    """Its index."""
    error: ConnectorError
    is_of_item: bool = True
    """Whether its request may go on without media; else its prompt is wrong."""


class Preparation:
    """Hands out the work of CPU workers, and takes its results."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._inputs = holdings.storage.inputs
        self._turn = 0
        """Which kind of job goes first: else none of a kind was done while others come fast."""

    @property
    def num_jobs(self) -> int:
        """How many things `take` would hand out."""
        to_prepare = len(self._holdings.to_prepare) if self._has_room else 0
        return len(self._holdings.to_count) + len(self._holdings.to_digest) + to_prepare

    @property
    def _has_room(self) -> bool:
        return self._inputs.used < self._holdings.config.input_bytes

    def take(self) -> Ticket | DigestJob | Entry | None:
        """Hand out a ticket to count, an item to hash or an entry to preprocess; None: there is none."""
        holdings = self._holdings
        queues: tuple[FairQueue[Any], ...] = (holdings.to_count, holdings.to_digest, holdings.to_prepare)
        for kind in range(self._turn, self._turn + len(queues)):
            queue = queues[kind % len(queues)]
            thing: Ticket | Occurrence | Entry | None = queue.first()
            if thing is None or (queue is holdings.to_prepare and not self._has_room):
                continue
            queue.take(thing)
            self._turn = (kind + 1) % len(queues)
            if isinstance(thing, Occurrence):
                reduction = thing.ticket.request.failure.reduce if thing.is_reducing else None
                return DigestJob(thing.ticket, thing, thing.media, reduction)
            if isinstance(thing, Entry):
                thing.is_preparing = True
            return thing
        return None

    def counted(self, ticket: Ticket, counts: Sequence[int], problem: Problem | None) -> None:
        """Take the tokens of each item, 0 if it was not looked at, and why its request may not go on."""
        if ticket.number not in self._holdings.tickets or ticket.is_counted:
            return  # nobody wants it any more
        for item, count in zip(ticket.items, counts, strict=True):
            item.num_tokens = count
        ticket.is_counted = True
        self._holdings.settled.notify_all()
        left = [item for item in ticket.items if item.state is State.NEW]
        if problem is not None and left:
            item = ticket.items[problem.item]
            item = item if item in left else left[0]  # it was cancelled alone, and others are not counted
            self._holdings.fail_item(item, problem.error, may_go_on=problem.is_of_item)
            return
        for item in left:
            self._holdings.to_digest.push(item, ticket.number, 1.0, ticket.request.tenant)

    def digested(self, job: DigestJob, result: Digested | ConnectorError) -> None:
        """An item was hashed."""
        item = job.item
        if item.state is not State.NEW:
            return  # nobody wants it any more
        ticket = item.ticket
        if isinstance(result, ConnectorError):
            self._holdings.fail_item(item, result)
            return
        item.digest = result.digest
        if item.is_reducing:
            item.is_reducing = False
            item.media, item.num_tokens = result.media, result.num_tokens
            ticket.epoch += 1
            self._holdings.stats.reductions += 1
            self._holdings.news[ticket.number] = ticket
        self._holdings.count_digested(ticket)

    def prepared(self, entry: Entry, result: PreparedItem | ConnectorError, cost: float) -> None:
        """An item was preprocessed."""
        holdings = self._holdings
        entry.is_preparing = False
        if entry not in holdings.storage.entries:
            return  # nobody wants it any more
        problem = result if isinstance(result, ConnectorError) else _mismatch(entry, result)
        if problem is not None:
            holdings.fail(entry, problem)
            return
        assert isinstance(result, PreparedItem)
        entry.inputs = self._inputs.take(result.num_bytes)
        entry.prepared = result
        entry.metadata = result.metadata
        entry.cost = cost
        entry.queued_at = holdings.clock()
        holdings.move(entry, State.QUEUED)
        holdings.to_encode.push(entry, entry.flow, cost, entry.tenant)


def _mismatch(entry: Entry, prepared: PreparedItem) -> ConnectorError | None:
    """Why what was preprocessed is not what was announced."""
    if prepared.digest != entry.digest:
        return ConnectorError("the media has changed since it was hashed", "media", retryable=True)
    if prepared.num_tokens != entry.num_tokens:
        return ConnectorError(
            f"its dimensions promise {entry.num_tokens} tokens; preprocessed it has {prepared.num_tokens}",
            "mismatch",
            retryable=False,
        )
    return None
