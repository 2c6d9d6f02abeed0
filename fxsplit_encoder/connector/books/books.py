"""The connector's state as an engine changes it: submit, hold, release, cancel, step, read."""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fxsplit_encoder.connector.books.encoding import Batch, Encoding
from fxsplit_encoder.connector.books.holdings import Admission, Holdings
from fxsplit_encoder.connector.books.preparation import Preparation
from fxsplit_encoder.connector.books.tickets import Account, Event, Feature, Occurrence, Ticket, has_passed
from fxsplit_encoder.connector.request import EncodeRequest, media_bytes
from fxsplit_encoder.connector.states import GONE, WAITING, Availability, State
from fxsplit_encoder.connector.statistics import ConnectorStats
from fxsplit_encoder.encode_queue.fair_queue import Shares
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError, InputError
from fxsplit_encoder.messages import shown

_LOOK_SECONDS = 0.002
"""After which a device is asked again whether it is through with memory that was let go of."""


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

    def __init__(self, holdings: Holdings, key_of: Callable[[bytes, str], bytes]) -> None:
        self.holdings = holdings
        self.admission = Admission(holdings, key_of)
        self.preparation = Preparation(holdings)
        self.encoding = Encoding(holdings)
        self.is_closed = False
        self._deadlines: list[tuple[float, int]] = []
        self._num_submitted = 0
        self._settled_at = 0.0

    def settle(self) -> None:
        """At the end of every change: admit requests for which there is memory, tell what became of them."""
        self._settled_at = self.holdings.clock()
        self.holdings.storage.settle()
        self.encoding.fail_unserved()
        self.admission.run()
        self.holdings.settle()

    # --- requests

    def submit(self, request: EncodeRequest) -> Ticket:
        """See `Connector.submit`."""
        holdings = self.holdings
        if self.is_closed:
            raise ConnectorError(f"request {request.id}: the connector is closed", "closed", retryable=False)
        if request.items:
            self._check_room(request)
        self._num_submitted += 1
        ticket = Ticket(request, self._num_submitted, holdings.settled, holdings.clock())
        holdings.touch(ticket)
        holdings.unsettled[ticket] = None
        holdings.stats.submitted += 1
        holdings.stats.items += len(ticket.items)
        self._set_deadline(ticket)
        if ticket.items:
            holdings.to_count.push(ticket, ticket.number, 1.0, request.tenant)
        return ticket

    def _check_room(self, request: EncodeRequest) -> None:
        holdings, config = self.holdings, self.holdings.config
        num_bytes = sum(media_bytes(item.media) for item in request.items)
        bounds = (
            ("max_waiting_items", "items", holdings.waiting, len(request.items), config.max_waiting_items),
            ("media_bytes", "bytes of media", holdings.media, num_bytes, config.media_bytes),
        )
        for name, unit, shares, wanted, most in bounds:
            if wanted > most:
                message = f"request {request.id}: it has {wanted} {unit}, and {name} is {most}"
                raise ConnectorError(message, "too_large", retryable=False)
            if shares.is_refused(request.tenant, wanted, most):
                holdings.stats.refused += 1
                raise ConnectorFullError(
                    f"request {request.id}: {shares.used} {unit} wait, and {name} is {most}; "
                    "submit it again once some are ready",
                    "full",
                    retryable=True,
                )

    def _set_deadline(self, ticket: Ticket) -> None:
        asked, default = ticket.request.timeout_s, self.holdings.config.timeout_s
        if (timeout := asked if asked is not None else default) is not None:
            ticket.deadline = self.holdings.clock() + timeout
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
        self.holdings.touch(ticket)
        for each in chosen:
            each.num_holds += 1
        return ticket.availability

    def _acquire(self, ticket: Ticket, released: list[Occurrence]) -> bool:
        """Find items again or have them encoded again; False: there is no memory, and none may be awaited."""
        holds_others = any(each.entry is not None for each in ticket.items)
        self.holdings.touch(ticket)
        self._set_deadline(ticket)  # what has to be encoded again has as long as it had at first
        if self.admission.admit(ticket, released):
            return True
        if holds_others:
            return False
        for each in released:
            each.move(State.NEW)
        self.holdings.await_memory(ticket)
        return True

    def release(self, ticket: Ticket, item: int | None = None, *, keep: bool = False) -> int:
        """See `Connector.release`; what was not held is left alone."""
        live = [each for each in _chosen(ticket, item) if each.is_live]
        for each in live:
            each.num_holds -= 1
            if keep and each.entry is not None:
                each.entry.keep = True
            if not each.num_holds:
                self.holdings.detach(each, State.CANCELLED if each.state in WAITING else State.RELEASED)
        return len(live) + self._release_text(ticket, item)

    def cancel(self, ticket: Ticket, item: int | None = None) -> bool:
        """See `Connector.cancel`."""
        live = [each for each in _chosen(ticket, item) if each.is_live]
        for each in live:
            self.holdings.detach(each, State.CANCELLED)
        return self._release_text(ticket, item) or bool(live)

    def _release_text(self, ticket: Ticket, item: int | None) -> bool:
        """Release a ticket without media; False: it has media, or is released already."""
        is_new = item is None and ticket.is_text and not ticket.is_released
        ticket.is_released |= is_new
        if ticket.number in self.holdings.tickets:
            self.holdings.touch(ticket)
        return is_new

    # --- time

    def expire(self) -> None:
        """Fails what was not ready in time."""
        now = self.holdings.clock()
        while self._next_timeout() <= now:
            ticket = self.holdings.tickets[heapq.heappop(self._deadlines)[1]]
            error = ConnectorError("not ready within its timeout", "timeout", retryable=True)
            for item in ticket.items:
                if item.state in WAITING:
                    self.holdings.fail_item(item, error)

    def next_deadline(self) -> float:
        """When a ticket has to be failed, a worker given up or a device asked next; infinite: never."""
        used = (event for feature in self.holdings.storage.quarantine for event in feature.read_events)
        # A thread that is still in a batch tells by itself once it returns.
        is_used = any(not isinstance(event, Batch) or event.has_ended for event in used)
        look = self._settled_at + _LOOK_SECONDS if is_used else math.inf
        return min(self._next_timeout(), self.encoding.next_hang(), look)

    def _next_timeout(self) -> float:
        while self._deadlines:
            deadline, number = self._deadlines[0]
            ticket = self.holdings.tickets.get(number)
            if ticket is not None and ticket.deadline == deadline and not ticket.is_settled:
                return deadline
            heapq.heappop(self._deadlines)
        return math.inf

    def step(self) -> Step:
        """Report changes of tickets since the last step."""
        self.encoding.poll()
        self.expire()
        self.settle()
        told = [self.holdings.news[number] for number in sorted(self.holdings.news)]
        self.holdings.news.clear()
        recounted = [ticket for ticket in told if ticket.epoch != ticket.told_epoch]
        for ticket in told:
            ticket.told_epoch = ticket.epoch
        return Step(
            ready=tuple(ticket for ticket in told if ticket.state is State.READY),
            deferred=tuple(self.holdings.unsettled),
            unavailable=tuple(t for t in told if t.state in GONE),
            recounted=tuple(recounted),
            released=tuple(ticket for ticket in told if ticket.state is State.RELEASED),
        )

    @property
    def has_pending_work(self) -> bool:
        """Whether a later step may have something to tell, or memory is not free yet because it is copied."""
        holdings = self.holdings
        return bool(holdings.unsettled or holdings.news or holdings.storage.quarantine)

    # --- reading

    def begin_read(self, ticket: Ticket, items: Iterable[int]) -> dict[int, Feature]:
        """The features of some items, which stay until `end_read`; InputError: one has none."""
        features = {}
        for index in items:
            item = ticket.items[index]
            if item.state is not State.READY:
                name = f"item {index} of request {ticket.request.id}"
                raise InputError(f"{name}: expected it to be ready; it is {item.state}")
            assert item.entry is not None and item.entry.feature is not None
            features[index] = item.entry.feature
        for feature in features.values():
            feature.num_reads += 1
        return features

    def end_read(self, features: Iterable[Feature], event: Event | None) -> None:
        """Every read of some features was given to the device, which is through with them at an event."""
        for feature in features:
            feature.num_reads -= 1
            events = [*feature.read_events, *([] if event is None else [event])]
            feature.read_events = [each for each in events if not has_passed(each)]
        self.settle()

    # --- the end

    def snapshot(self) -> ConnectorStats:
        """The counts as they are now."""
        holdings = self.holdings
        snapshot = copy.deepcopy(holdings.stats)
        accounts: dict[str, Account | Shares] = {**holdings.storage.accounts, "media": holdings.media}
        snapshot.bytes_used = {name: account.used for name, account in accounts.items()}
        snapshot.bytes_peak = {name: account.peak for name, account in accounts.items()}
        snapshot.waiting_items = holdings.waiting.used
        snapshot.live_tickets = len(holdings.tickets)
        return snapshot

    def clear_cache(self) -> None:
        """Free every feature that no item holds."""
        for entry in self.holdings.storage.resting:
            self.holdings.drop(entry, State.RELEASED)

    def close(self) -> None:
        """Cancels every ticket; further ones are refused. What workers have in hand they finish."""
        self.is_closed = True
        for ticket in list(self.holdings.tickets.values()):
            self.cancel(ticket)
        self.clear_cache()


def _chosen(ticket: Ticket, item: int | None) -> tuple[Occurrence, ...]:
    if item is None:
        return ticket.items
    if not 0 <= item < len(ticket.items):
        expected = f"an index below {len(ticket.items)} of {ticket.request.id}"
        raise InputError(f"item: expected {expected}; got {shown(item)}")
    return (ticket.items[item],)
