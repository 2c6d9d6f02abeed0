"""The connector's state, and the work of CPU workers: read headers, hash, ask less of, decode, preprocess."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxsplit_encoder.connector.books.encoding import Encoding
from fxsplit_encoder.connector.books.holdings import Admission, Holdings
from fxsplit_encoder.connector.books.parts import INPUTS, Parts
from fxsplit_encoder.connector.books.tickets import Entry, Event, Feature, Occurrence, Ticket
from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem, Reduction
from fxsplit_encoder.connector.request import EncodeRequest, media_bytes
from fxsplit_encoder.connector.states import GONE, WAITING, Availability, State
from fxsplit_encoder.connector.statistics import ConnectorStats
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError


@dataclass(frozen=True, eq=False)
class CountJob:
    """Read the headers of a request's media."""

    ticket: Ticket


@dataclass(frozen=True, eq=False)
class DigestJob:
    """Hash an item, after having asked less of it if `reduction` says so."""

    ticket: Ticket
    item: Occurrence
    media: MediaItem
    reduction: Reduction | None


@dataclass(frozen=True, eq=False)
class Digested:
    """What became of a `DigestJob`."""

    media: MediaItem
    num_tokens: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class PrepareJob:
    """Decode and preprocess the item of a feature that has to be encoded."""

    entry: Entry
    media: MediaItem


class Problem(NamedTuple):
    """Why a request cannot be served, known before anything is hashed."""

    item: int
    """Its index."""
    error: ConnectorError
    is_of_item: bool = True
    """Whether its request may go on without media; else its prompt is wrong."""


class Preparation:
    """Hands out the work of CPU workers, and takes its results."""

    def __init__(self, parts: Parts, holdings: Holdings) -> None:
        self._parts = parts
        self._holdings = holdings
        self._turn = 0
        """Which kind of job goes first: else none of a kind was done while others come fast."""

    @property
    def num_jobs(self) -> int:
        """How many things `take` would hand out."""
        to_prepare = len(self._parts.to_prepare) if self._has_room else 0
        return len(self._parts.to_count) + len(self._parts.to_digest) + to_prepare

    @property
    def _has_room(self) -> bool:
        return self._parts.ledger.used(INPUTS) < self._parts.config.input_bytes

    def take(self) -> CountJob | DigestJob | PrepareJob | None:
        """The next thing to do; None: nothing, or too much waits for encoders already."""
        kinds = (self._count_job, self._digest_job, self._prepare_job)
        for kind in range(self._turn, self._turn + len(kinds)):
            if (job := kinds[kind % len(kinds)]()) is not None:
                self._turn = (kind + 1) % len(kinds)
                return job
        return None

    def _count_job(self) -> CountJob | None:
        if (ticket := self._parts.to_count.first()) is None:
            return None
        self._parts.to_count.take(ticket)
        return CountJob(ticket)

    def _digest_job(self) -> DigestJob | None:
        if (item := self._parts.to_digest.first()) is None:
            return None
        self._parts.to_digest.take(item)
        ticket = self._parts.tickets[item.ticket]
        return DigestJob(
            ticket, item, item.media, ticket.request.failure.reduce if item.is_reducing else None
        )

    def _prepare_job(self) -> PrepareJob | None:
        if (entry := self._parts.to_prepare.first()) is None or not self._has_room:
            return None
        self._parts.to_prepare.take(entry)
        entry.is_preparing = True
        assert entry.media is not None
        return PrepareJob(entry, entry.media)

    def counted(self, ticket: Ticket, counts: Sequence[int], problem: Problem | None) -> None:
        """Take the tokens of each item, 0 if it was not looked at, and why its request may not go on."""
        if ticket.number not in self._parts.tickets or ticket.is_counted:
            return  # nobody wants it any more
        for item, count in zip(ticket.items, counts, strict=True):
            item.num_tokens = count
        ticket.is_counted = True
        self._parts.settled.notify_all()
        left = [item for item in ticket.items if item.state is State.NEW]
        if problem is not None and left:
            item = ticket.items[problem.item]
            item = item if item in left else left[0]  # it was cancelled alone, and others are not counted
            self._holdings.fail_item(item, problem.error, may_go_on=problem.is_of_item)
            return
        for item in left:
            self._parts.to_digest.push(item, ticket.number, 1.0, ticket.request.tenant)

    def digested(self, job: DigestJob, result: Digested | ConnectorError) -> None:
        """An item was hashed."""
        item = job.item
        if item.state is not State.NEW:
            return  # nobody wants it any more
        ticket = self._parts.tickets[item.ticket]
        if isinstance(result, ConnectorError):
            self._holdings.fail_item(item, result)
            return
        item.digest = result.digest
        if item.is_reducing:
            item.is_reducing = False
            item.media, item.num_tokens = result.media, result.num_tokens
            ticket.epoch += 1
            self._parts.stats.reductions += 1
            self._parts.news[ticket.number] = ticket
        self._holdings.count_digested(ticket)

    def prepared(self, job: PrepareJob, result: PreparedItem | ConnectorError, cost: float) -> None:
        """An item was preprocessed."""
        entry, parts = job.entry, self._parts
        entry.is_preparing = False
        if entry not in parts.cache.entries:
            return  # nobody wants it any more
        problem = result if isinstance(result, ConnectorError) else _mismatch(entry, result)
        if problem is not None:
            self._holdings.fail(entry, problem)
            return
        assert isinstance(result, PreparedItem)
        reserved = parts.ledger.reserve(INPUTS, entry, result.num_bytes)
        assert reserved
        entry.prepared = result
        entry.metadata = result.metadata
        entry.cost = cost
        entry.queued_at = parts.clock()
        self._holdings.move(entry, State.QUEUED)
        parts.to_encode.push(entry, entry.flow, cost, entry.tenant)


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


class Step(NamedTuple):
    """Changes of tickets since the last step."""

    ready: tuple[Ticket, ...]
    """Tickets that have become ready since the last step."""
    deferred: tuple[Ticket, ...]
    """All tickets that are not ready yet."""
    unavailable: tuple[Ticket, ...]
    """Tickets that have failed or were cancelled since the last step."""
    recounted: tuple[Ticket, ...]
    """Tickets whose token counts have changed since the last step."""
    released: tuple[Ticket, ...]
    """Tickets of which nothing has been held any more since the last step."""


class Books:
    """The connector's state."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.holdings = Holdings(parts)
        self.admission = Admission(parts, self.holdings)
        self.preparation = Preparation(parts, self.holdings)
        self.encoding = Encoding(parts, self.holdings)
        self.is_closed = False
        self._deadlines: list[tuple[float, int]] = []
        self._num_submitted = 0

    def settle(self) -> None:
        """At the end of every change: let in whom memory suffices for now, and tell what became of whom."""
        self.parts.storage.settle()
        self.encoding.fail_unserved()
        self.admission.run()
        self.holdings.settle()

    # --- requests

    def submit(self, request: EncodeRequest) -> Ticket:
        """See `Connector.submit`."""
        parts = self.parts
        if self.is_closed:
            raise ConnectorError(f"request {request.id}: the connector is closed", "closed", retryable=False)
        if request.items:
            self._check_room(request)
        self._num_submitted += 1
        ticket = Ticket(request, self._num_submitted, parts.settled, parts.clock())
        parts.tickets[ticket.number] = ticket
        parts.changed[ticket.number] = ticket
        parts.stats.submitted += 1
        parts.stats.items += len(ticket.items)
        self._set_deadline(ticket)
        ticket.num_undigested = len(ticket.items)
        if ticket.items:
            parts.to_count.push(ticket, ticket.number, 1.0, request.tenant)
        return ticket

    def _check_room(self, request: EncodeRequest) -> None:
        parts, config = self.parts, self.parts.config
        bounds = (
            ("max_waiting_items", "items", parts.waiting, len(request.items), config.max_waiting_items),
            ("media_bytes", "bytes of media", parts.media, _media_bytes(request), config.media_bytes),
        )
        for name, unit, shares, wanted, most in bounds:
            if wanted > most:
                message = f"request {request.id}: it has {wanted} {unit}, and {name} is {most}"
                raise ConnectorError(message, "too_large", retryable=False)
            if shares.is_refused(request.tenant, wanted, most):
                parts.stats.refused += 1
                raise ConnectorFullError(
                    f"request {request.id}: {shares.used} {unit} wait, and {name} is {most}; "
                    "submit it again once some are ready",
                    "full",
                    retryable=True,
                )

    def _set_deadline(self, ticket: Ticket) -> None:
        asked, default = ticket.request.timeout_s, self.parts.config.timeout_s
        if (timeout := asked if asked is not None else default) is not None:
            ticket.deadline = self.parts.clock() + timeout
            heapq.heappush(self._deadlines, (ticket.deadline, ticket.number))

    def hold(self, ticket: Ticket, item: int | None = None) -> Availability:
        """See `Connector.hold`; "unavailable": nothing has changed."""
        if self.is_closed or ticket.state in GONE:
            return "unavailable"
        chosen = [each for each in _chosen(ticket, item) if not ticket.text_only and each.state not in GONE]
        released = [each for each in chosen if each.state is State.RELEASED]
        if not chosen and not ticket.is_text:
            return "unavailable"
        if released and not self._acquire(ticket, released):
            return "unavailable"
        ticket.is_released = False
        self._reopen(ticket)
        for each in chosen:
            each.num_holds += 1
        return ticket.availability

    def _acquire(self, ticket: Ticket, released: list[Occurrence]) -> bool:
        """Finds items again or has them encoded again; False: there is no memory, and none to be waited
        for.
        """
        holds_others = any(each.entry is not None for each in ticket.items)
        self._reopen(ticket)
        self._set_deadline(ticket)  # what has to be encoded again has as long as it had at first
        if self.admission.admit(ticket, released):
            return True
        if holds_others:
            return False
        for each in released:
            each.move(State.NEW)
        self.parts.to_admit[ticket.number] = ticket
        return True

    def _reopen(self, ticket: Ticket) -> None:
        """A ticket that may have ended is known again."""
        if ticket.number not in self.parts.tickets:
            self.parts.tickets[ticket.number] = ticket
        self.parts.changed[ticket.number] = ticket

    def release(self, ticket: Ticket, item: int | None = None, *, keep: bool = False) -> int:
        """See `Connector.release`; what was not held is left alone."""
        num_released = 0
        for each in _chosen(ticket, item):
            if each.state not in WAITING and each.state is not State.READY:
                continue
            num_released += 1
            each.num_holds -= 1
            if keep and each.entry is not None and each.entry.key is not None:
                each.entry.keep = True
            if not each.num_holds:
                self.holdings.detach(each, State.CANCELLED if each.state in WAITING else State.RELEASED)
        if item is None and ticket.is_text and not ticket.is_released:
            ticket.is_released = True
            num_released += 1
        if ticket.number in self.parts.tickets:
            self.parts.changed[ticket.number] = ticket
        return num_released

    def cancel(self, ticket: Ticket, item: int | None = None) -> bool:
        """See `Connector.cancel`."""
        given_up = False
        for each in _chosen(ticket, item):
            if each.state in WAITING or each.state is State.READY:
                self.holdings.detach(each, State.CANCELLED)
                given_up = True
        if item is None and ticket.is_text and not ticket.is_released:
            ticket.is_released = given_up = True
        if ticket.number in self.parts.tickets:
            self.parts.changed[ticket.number] = ticket
        return given_up

    # --- time

    def expire(self) -> None:
        """Fails what was not ready in time."""
        now = self.parts.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, number = heapq.heappop(self._deadlines)
            ticket = self.parts.tickets.get(number)
            if ticket is None or ticket.deadline != deadline:
                continue
            error = ConnectorError("not ready within its timeout", "timeout", retryable=True)
            for item in ticket.items:
                if item.state in WAITING:
                    self.holdings.fail_item(item, error)

    def next_deadline(self) -> float | None:
        """When a ticket has to be failed or a worker given up next; None: nothing waits."""
        while self._deadlines:
            deadline, number = self._deadlines[0]
            ticket = self.parts.tickets.get(number)
            if ticket is not None and ticket.deadline == deadline and not ticket.is_settled:
                break
            heapq.heappop(self._deadlines)
        hang = self.encoding.next_hang()
        found = [deadline for deadline, _ in self._deadlines[:1]] + ([] if hang is None else [hang])
        return min(found, default=None)

    def step(self) -> Step:
        """What has become of whom since the last step."""
        self.encoding.poll()
        self.expire()
        self.settle()
        told = [self.parts.news[number] for number in sorted(self.parts.news)]
        self.parts.news.clear()
        recounted = [ticket for ticket in told if ticket.epoch != ticket.told_epoch]
        for ticket in told:
            ticket.told_epoch = ticket.epoch
        return Step(
            ready=tuple(ticket for ticket in told if ticket.state is State.READY),
            deferred=tuple(self.parts.unsettled.values()),
            unavailable=tuple(t for t in told if t.state in GONE),
            recounted=tuple(recounted),
            released=tuple(ticket for ticket in told if ticket.state is State.RELEASED),
        )

    @property
    def has_pending_work(self) -> bool:
        """Whether a later step may have something to tell, or memory is not free yet because it is copied."""
        parts = self.parts
        return bool(parts.unsettled) or bool(parts.news) or bool(parts.storage.quarantine)

    # --- reading

    def begin_read(self, ticket: Ticket, items: Iterable[int]) -> dict[int, Feature]:
        """The features of some items, which stay where they are until `end_read`."""
        features = {}
        for index in items:
            entry = ticket.items[index].entry
            assert entry is not None and entry.feature is not None
            entry.feature.num_reads += 1
            features[index] = entry.feature
        return features

    def end_read(self, features: Iterable[Feature], event: Event | None) -> None:
        """Every read of some features was given to the device, which is through with them at an event."""
        for feature in features:
            feature.num_reads -= 1
            feature.read_events = [each for each in feature.read_events if not each.query()]
            if event is not None and not event.query():
                feature.read_events.append(event)
        self.settle()

    # --- the end

    def snapshot(self) -> ConnectorStats:
        """The counts as they are now."""
        parts, ledger = self.parts, self.parts.ledger
        snapshot = copy.deepcopy(parts.stats)
        snapshot.bytes_used = {account: ledger.used(account) for account in ledger.accounts()}
        snapshot.bytes_peak = dict(ledger.peaks)
        snapshot.waiting_items = parts.waiting.used
        snapshot.max_batch_items = parts.config.max_batch_items
        snapshot.live_tickets = len(parts.tickets)
        return snapshot

    def clear_cache(self) -> None:
        """Free every feature that no item holds."""
        for entry in list(self.parts.cache.resting()):
            self.holdings.drop(entry, State.RELEASED)
        self.parts.storage.settle()

    def close(self) -> None:
        """Cancels every ticket; further ones are refused. What workers have in hand they finish."""
        self.is_closed = True
        for ticket in list(self.parts.tickets.values()):
            self.cancel(ticket)
        self.clear_cache()


def _media_bytes(request: EncodeRequest) -> int:
    return sum(media_bytes(item.media) for item in request.items)


def _chosen(ticket: Ticket, item: int | None) -> tuple[Occurrence, ...]:
    return ticket.items if item is None else (ticket.items[item],)
