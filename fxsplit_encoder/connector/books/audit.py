"""Whether the books are in order: everything is counted again from the objects themselves, and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fxsplit_encoder.connector.books.books import Books
from fxsplit_encoder.connector.books.tickets import Memory, Occurrence, Ticket, capacity_of
from fxsplit_encoder.connector.states import GONE, WAITING, Residence, State


def audit(books: Books) -> list[str]:
    """Count again; a sentence for all that does not add up, of which there is nothing after `settle`."""
    return [*_tickets(books), *_entries(books), *_queues(books), *_memory(books)]


def _tickets(books: Books) -> Iterator[str]:
    holdings = books.holdings
    tickets = list(holdings.tickets.values())
    for ticket in tickets:
        yield from _ticket(ticket, ticket in holdings.to_admit)
    unsettled = {ticket for ticket in tickets if not ticket.is_settled}
    if unsettled != set(holdings.unsettled):
        yield f"{len(unsettled)} tickets are not ready, {len(holdings.unsettled)} counted"
    waiting = [item.media_bytes for ticket in tickets for item in ticket.items if item.state in WAITING]
    counted = (holdings.waiting.used, holdings.media.used)
    if counted != (len(waiting), sum(waiting)):
        yield f"{len(waiting)} items wait with {sum(waiting)} bytes of media, counted are {counted}"
    if not set(holdings.to_admit) <= set(tickets):
        yield "a ticket waits for memory, and is not known"


def _ticket(ticket: Ticket, waits_for_memory: bool) -> Iterator[str]:
    for item in ticket.items:
        yield from _item(item)
    undigested = any(item.is_undigested for item in ticket.items)
    if waits_for_memory != (bool(ticket.without_memory) and not undigested):
        yield f"{ticket}: {len(ticket.without_memory)} items need memory, and it waits: {waits_for_memory}"
    if ticket.state in GONE or ticket.state is State.RELEASED:
        yield f"{ticket}: has ended and is still known"


def _item(item: Occurrence) -> Iterator[str]:
    entry = item.entry
    if item.is_live != (item.num_holds > 0):
        yield f"{item}: {item.state} with {item.num_holds} holds"
    if item.memory is not None and (item.state is not State.NEW or entry is not None):
        yield f"{item}: {item.state} with memory of its own"
    if entry is None:
        if item.is_live and item.state is not State.NEW:
            yield f"{item}: {item.state} without a feature"
    elif item not in entry.holders or (item.state, item.num_tokens) != (entry.state, entry.num_tokens):
        yield f"{item}: {item.state}, and its feature does not know it as such: {entry}"


def _entries(books: Books) -> Iterator[str]:
    for entry in books.holdings.storage.entries.values():
        for item in entry.holders:
            if item.entry is not entry or item.ticket.number not in books.holdings.tickets:
                yield f"{entry}: held by {item}, which does not know"
        is_ready = entry.state is State.READY
        if not entry.is_wanted and entry.state is not State.ENCODING:
            yield f"{entry}: nobody wants it"
        if entry.state in GONE or entry.state is State.RELEASED:
            yield f"{entry}: is known, and gone"
        has_rows = entry.feature is not None and entry.feature.rows is not None
        if is_ready != has_rows and entry.state is not State.ENCODING:
            yield f"{entry}: has {entry.feature}"
        is_copied = entry.feature is not None and entry.feature.residence is Residence.HOST and not is_ready
        memory = entry.feature.memory if is_copied and entry.feature is not None else entry.memory
        own = memory.num_bytes if memory is not None else 0
        if (own > 0) == is_ready or 0 < own < capacity_of(entry.num_bytes):
            yield f"{entry}: has {own} bytes to be encoded"


def _queues(books: Books) -> Iterator[str]:
    holdings, entries = books.holdings, books.holdings.storage.entries.values()
    queued = {entry for entry in entries if entry.state is State.QUEUED}
    if queued != set(holdings.to_encode):
        yield f"{len(queued)} features are queued, the queue has {len(holdings.to_encode)}"
    new = {entry for entry in entries if entry.state is State.NEW and not entry.is_preparing}
    if new != set(holdings.to_prepare):
        yield f"{len(new)} features are to be preprocessed, the queue has {len(holdings.to_prepare)}"
    for item in holdings.to_digest:
        if item.state is not State.NEW or item.digest is not None:
            yield f"{item}: is to be hashed, and {item.state}"
    batches = [batch for worker in books.encoding.workers.values() for batch in worker.batches]
    in_hand = Counter(entry for batch in batches for entry in batch.entries)
    encoded = {entry for entry in entries if entry.state is State.ENCODING}
    if set(in_hand) != encoded or set(in_hand.values()) - {1}:
        yield f"{len(encoded)} features are encoded, batches have {in_hand.total()}"


def _memory(books: Books) -> Iterator[str]:
    found = Counter(_held(books))
    for account in books.holdings.storage.accounts.values():
        held = sum(memory.num_bytes for memory in found if memory.account is account)
        if held != account.used:
            yield f"{account.name}: {held} bytes are held, {account.used} reserved"
        if account.limit is not None and account.peak > account.limit:
            yield f"{account.name}: {account.peak} of {account.limit} bytes were reserved"
    for memory, times in found.items():
        if times > 1 or memory.is_freed:
            yield f"{memory.account.name}: {memory.num_bytes} bytes are held {times} times"


def _held(books: Books) -> Iterator[Memory]:
    """All memory that is reserved, as the objects say."""
    storage = books.holdings.storage
    features = [*storage.quarantine, *(entry.feature for entry in storage.entries.values() if entry.feature)]
    held = [feature.memory for feature in features]
    held += [memory for entry in storage.entries.values() for memory in (entry.memory, entry.inputs)]
    held += [item.memory for ticket in books.holdings.tickets.values() for item in ticket.items]
    held += [batch.memory for worker in books.encoding.workers.values() for batch in worker.batches]
    return (memory for memory in held if memory is not None)
