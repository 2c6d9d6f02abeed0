"""Whether the books are in order: everything is counted again from the objects themselves, and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from fxsplit_encoder.connector.books.books import Books
from fxsplit_encoder.connector.books.parts import INPUTS, MEDIA
from fxsplit_encoder.connector.books.storage import HOST, capacity_of
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence
from fxsplit_encoder.connector.states import WAITING, Residence, State


def audit(books: Books) -> list[str]:
    """What does not add up, a sentence each; empty: the books are in order, as they are after `settle`."""
    parts = books.parts
    return [
        *parts.ledger.problems(),
        *parts.cache.problems(),
        *_tickets(books),
        *_entries(books),
        *_queues(books),
        *_workers(books),
        *_bytes(books),
    ]


def _tickets(books: Books) -> Iterator[str]:
    parts = books.parts
    for ticket in parts.tickets.values():
        for item in ticket.items:
            yield from _item(item)
        undigested = sum(item.state is State.NEW and item.digest is None for item in ticket.items)
        if undigested != ticket.num_undigested:
            yield f"{ticket}: {undigested} items to hash, {ticket.num_undigested} counted"
        if ticket.without_memory and not undigested and ticket.number not in parts.to_admit:
            yield f"{ticket}: needs memory and does not wait for it"
        if ticket.state in (State.FAILED, State.CANCELLED, State.RELEASED):
            yield f"{ticket}: has ended and is still known"
    unsettled = {number for number, ticket in parts.tickets.items() if not ticket.is_settled}
    if unsettled != set(parts.unsettled):
        yield f"{len(unsettled)} tickets are not ready, {len(parts.unsettled)} counted"
    waiting = sum(item.state in WAITING for ticket in parts.tickets.values() for item in ticket.items)
    if waiting != parts.waiting.used or parts.media.used != parts.ledger.used(MEDIA):
        yield f"{waiting} items wait, {parts.waiting.used} counted, of {parts.media.used} bytes"
    for number, ticket in parts.to_admit.items():
        if parts.tickets.get(number) is not ticket or not ticket.without_memory:
            yield f"{ticket}: waits for memory and needs none"


def _item(item: Occurrence) -> Iterator[str]:
    entry, is_live = item.entry, item.state in WAITING or item.state is State.READY
    if is_live != (item.num_holds > 0):
        yield f"{item}: {item.state} with {item.num_holds} holds"
    if entry is None:
        if is_live and item.state is not State.NEW:
            yield f"{item}: {item.state} without a feature"
        return
    if item not in entry.holders or item.state is not entry.state:
        yield f"{item}: {item.state}, and its feature does not know it as such: {entry}"
    if entry.num_tokens != item.num_tokens:
        yield f"{item}: {item.num_tokens} tokens, its feature has {entry.num_tokens}"


def _entries(books: Books) -> Iterator[str]:
    parts = books.parts
    for entry in parts.cache.entries:
        for item in entry.holders:
            if item.entry is not entry or item.ticket not in parts.tickets:
                yield f"{entry}: held by {item}, which does not know"
        if not entry.is_wanted and entry.state is not State.ENCODING:
            yield f"{entry}: nobody wants it"
        if (entry.state is State.READY) != (entry.feature is not None and entry.feature.rows is not None):
            if entry.state is not State.ENCODING:
                yield f"{entry}: has {entry.feature}"


def _queues(books: Books) -> Iterator[str]:
    parts = books.parts
    queued = {entry for entry in parts.cache.entries if entry.state is State.QUEUED}
    if queued != set(parts.to_encode):
        yield f"{len(queued)} features are queued, the queue has {len(parts.to_encode)}"
    to_prepare = {
        entry for entry in parts.cache.entries if entry.state is State.NEW and not entry.is_preparing
    }
    if to_prepare != set(parts.to_prepare):
        yield f"{len(to_prepare)} features are to be preprocessed, the queue has {len(parts.to_prepare)}"
    for item in parts.to_digest:
        if item.state is not State.NEW or item.digest is not None:
            yield f"{item}: is to be hashed, and {item.state}"


def _workers(books: Books) -> Iterator[str]:
    encoding = books.encoding
    in_hand = Counter(entry for batch in encoding.batches for entry in batch.entries)
    encoded = {entry for entry in books.parts.cache.entries if entry.state is State.ENCODING}
    if set(in_hand) != encoded or set(in_hand.values()) - {1}:
        yield f"{len(encoded)} features are encoded, batches have {in_hand.total()}"
    for worker in encoding.workers.values():
        own = [batch for batch in encoding.batches if batch.worker is worker]
        load = sum(batch.cost for batch in own)
        if len(own) != worker.num_batches or abs(load - worker.load) > 1e-6 * max(1.0, load):
            yield f"{worker}: {len(own)} batches of {load}, counted {worker.num_batches} of {worker.load}"


def _bytes(books: Books) -> Iterator[str]:
    ledger, expected = books.parts.ledger, _expected(books)
    for account in ledger.accounts():
        owned = dict(ledger.owners(account))
        for owner in owned.keys() | expected.get(account, {}).keys():
            found, wanted = owned.get(owner, 0), expected.get(account, {}).get(owner, 0)
            # A buffer may be larger than asked for, where less was asked of its item later.
            if found != wanted and not (account == HOST and found > wanted > 0):
                yield f"{account}: {owner} has {found} bytes, expected {wanted}"


def _expected(books: Books) -> dict[str, dict[Hashable, int]]:
    """Who should have how many bytes of which account, as the objects say."""
    parts = books.parts
    expected: dict[str, dict[Hashable, int]] = {account: {} for account in parts.ledger.accounts()}
    for entry in parts.cache.entries:
        _expect_of(entry, expected)
    for ticket in parts.tickets.values():
        for item in ticket.items:
            if item.state is State.NEW and item.entry is None and (owned := parts.ledger.owned(HOST, item)):
                expected[HOST][item] = owned  # whether it may own any: it waits, and has no feature
            if item.state in WAITING:
                expected[MEDIA][item] = item.media_bytes
    for batch in books.encoding.batches:
        expected[batch.worker.account][batch] = batch.num_bytes
    for feature in parts.storage.quarantine:
        expected[feature.account][feature] = parts.ledger.owned(feature.account, feature)
    return {
        account: {owner: num_bytes for owner, num_bytes in owners.items() if num_bytes}
        for account, owners in expected.items()
    }


def _expect_of(entry: Entry, expected: dict[str, dict[Hashable, int]]) -> None:
    if entry.state is not State.READY:
        expected[HOST][entry] = capacity_of(entry.num_bytes)
    if entry.prepared is not None:
        expected[INPUTS][entry] = entry.prepared.num_bytes
    feature = entry.feature
    if feature is not None and feature.residence is Residence.DEVICE:
        expected[feature.account][feature] = entry.num_bytes
    elif feature is not None and entry.state is State.READY:
        expected[HOST][feature] = capacity_of(entry.num_bytes)
