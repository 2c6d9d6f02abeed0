"""What CPU workers do to items: hash them, ask less of them, decode and preprocess them."""

from __future__ import annotations

from dataclasses import dataclass

from fxsplit_encoder.connector.books.entry import Entry, Occurrence
from fxsplit_encoder.connector.books.holdings import Holdings
from fxsplit_encoder.connector.books.parts import INPUTS, Parts
from fxsplit_encoder.connector.seams import MediaItem, PreparedItem, Reduction
from fxsplit_encoder.connector.states import State
from fxsplit_encoder.errors import ConnectorError


@dataclass(frozen=True, eq=False)
class DigestJob:
    """Hash an item, after having asked less of it if `reduction` says so."""

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


class Preparation:
    """Hands out the work of CPU workers, and takes its results."""

    def __init__(self, parts: Parts, holdings: Holdings) -> None:
        self._parts = parts
        self._holdings = holdings
        self._was_hashed = False
        """Whether the last job was to hash."""

    @property
    def num_jobs(self) -> int:
        """How many things `take` would hand out."""
        to_prepare = len(self._parts.to_prepare) if self._has_room else 0
        return len(self._parts.to_digest) + to_prepare

    @property
    def _has_room(self) -> bool:
        return self._parts.ledger.used(INPUTS) < self._parts.config.input_bytes

    def take(self) -> DigestJob | PrepareJob | None:
        """The next thing to do; None: nothing, or too much waits for encoders already."""
        may_prepare = bool(self._parts.to_prepare) and self._has_room
        # In turns: else nothing was preprocessed for as long as requests come as fast as they are hashed.
        if self._parts.to_digest and not (may_prepare and self._was_hashed):
            self._was_hashed = True
            return self._digest_job()
        self._was_hashed = False
        return self._prepare_job() if may_prepare else None

    def _digest_job(self) -> DigestJob:
        item = next(iter(self._parts.to_digest))
        self._parts.to_digest.take(item)
        policy = self._parts.tickets[item.ticket].request.failure
        return DigestJob(item, item.media, policy.reduce if item.is_reducing else None)

    def _prepare_job(self) -> PrepareJob:
        entry = next(iter(self._parts.to_prepare))
        self._parts.to_prepare.take(entry)
        entry.is_preparing = True
        return PrepareJob(entry, entry.media)

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
        """An item was preprocessed.

        Args:
            job: as it was taken.
            result: the item, or why there is none.
            cost: predicted, of encoding it.
        """
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
        parts.to_encode.push(entry, entry.flow, cost)


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
