"""CPU workers: threads that read headers of media, hash, decode and preprocess them."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fxsplit_encoder.connector.books.preparation import Digested, Job
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence, Ticket, capacity_of
from fxsplit_encoder.connector.interfaces import MediaItem, MediaProcessor, PreparedItem, Reduction
from fxsplit_encoder.connector.request import EncodeRequest
from fxsplit_encoder.connector.states import failure_of
from fxsplit_encoder.connector.threads.core import Core
from fxsplit_encoder.errors import ConnectorError, MediaError
from fxsplit_encoder.messages import shown


class Preparers:
    """Some threads that do what the books have for them, each one thing at a time."""

    def __init__(
        self,
        core: Core,
        processor: MediaProcessor,
        stage: Callable[[PreparedItem], tuple[PreparedItem, float]],
        num_threads: int,
    ) -> None:
        self._core = core
        self._processor = processor
        self._stage = stage
        self.threads = [
            threading.Thread(target=self._run, name=f"connector-cpu-{number}", daemon=True)
            for number in range(num_threads)
        ]

    def _run(self) -> None:
        while (job := self._take()) is not None:
            if isinstance(job, Ticket):
                self._count(job)
            elif isinstance(job, tuple):
                self._digest(*job)
            else:
                self._prepare(job)
            del job  # no media of it are kept while the next is waited for

    def _take(self) -> Job | None:
        with self._core.lock:
            while not self._core.books.is_closed:
                if (job := self._core.books.preparation.take()) is not None:
                    return job
                self._core.cpu_work.wait()
        return None

    def _count(self, ticket: Ticket) -> None:
        counts = [0] * len(ticket.items)
        error, index = self._read_headers(ticket.request, counts)
        with self._core.change() as books:
            books.preparation.counted(ticket, counts, error, index)

    def _read_headers(
        self, request: EncodeRequest, counts: list[int]
    ) -> tuple[ConnectorError | None, int | None]:
        """Fill in the tokens of each item; why the request cannot be served, and for which item."""
        config = self._core.config
        sizes: dict[int, int] = {}
        for index, item in enumerate(request.items):
            size = _attempt("media", self._counted, item, index, counts)
            if isinstance(size, ConnectorError):
                return size, index
            if size > config.staging_bytes:
                message = f"its feature has {size} bytes, and staging_bytes is {config.staging_bytes}"
                return ConnectorError(message, "too_large", retryable=False), index
            sizes[id(item)] = capacity_of(size)
        if (total := sum(sizes.values())) > config.host_bytes:
            message = f"its request takes {total} bytes, and host_bytes is {config.host_bytes}"
            return ConnectorError(message, "too_large", retryable=False), 0
        fits = _attempt("mismatch", _check_prompt, request, counts)
        return (fits if isinstance(fits, ConnectorError) else None), None

    def _counted(self, item: MediaItem, index: int, counts: list[int]) -> int:
        """Bytes of an item's feature, and in its place the tokens that it has."""
        if (row_bytes := self._core.books.holdings.row_bytes(item.modality)) is None:
            raise MediaError(f"no encoder takes {shown(item.modality)}")
        counts[index] = self._count_of(item)
        return counts[index] * row_bytes

    def _count_of(self, item: MediaItem) -> int:
        """A processor's count as an integer; TypeError or ValueError: it is none of at least 0."""
        count = self._processor.count_tokens(item)
        number = -1 if isinstance(count, bool) else operator.index(count)
        if number < 0:
            raise ValueError(f"count_tokens: expected an integer of at least 0; got {shown(count)}")
        return number

    def _digest(self, ticket: Ticket, item: Occurrence) -> None:
        result = _attempt("media", self._digested, ticket, item)
        with self._core.change() as books:
            books.preparation.digested(ticket, item, result)

    def _digested(self, ticket: Ticket, item: Occurrence) -> Digested:
        media, num_tokens = item.media, item.num_tokens
        if item.is_reducing and (how := ticket.request.failure.reduce) is not None:
            media, num_tokens = self._reduced(ticket, item, how)
        digest: object = self._processor.digest(media)
        if not isinstance(digest, bytes):
            raise TypeError(f"digest: expected bytes of the processor; got {shown(digest)}")
        return media, num_tokens, digest

    def _reduced(self, ticket: Ticket, item: Occurrence, how: Reduction) -> tuple[MediaItem, int]:
        media = self._processor.reduce(item.media, how)
        if media is None or (num_tokens := self._count_of(media)) >= item.num_tokens:
            raise ConnectorError(
                "memory ran out, and it has no more to give", "out_of_memory", retryable=True
            )
        _check_prompt(
            ticket.request, [num_tokens if each is item else each.num_tokens for each in ticket.items]
        )
        return media, num_tokens

    def _prepare(self, entry: Entry) -> None:
        started = time.monotonic()
        result: Any = _attempt("media", self._prepared, entry)
        if not isinstance(result, ConnectorError):
            result = _attempt("encoder", self._staged, entry, result)
        with self._core.change() as books:
            books.holdings.stats.prepare.add(time.monotonic() - started)
            books.preparation.prepared(entry, result)

    def _prepared(self, entry: Entry) -> PreparedItem:
        assert entry.media is not None
        item: object = self._processor.prepare(entry.media)
        if not isinstance(item, PreparedItem):
            raise TypeError(f"prepare: expected a PreparedItem; got {shown(item)}")
        return item

    def _staged(self, entry: Entry, item: PreparedItem) -> tuple[PreparedItem, float]:
        """The item as encoders take it, and its cost: under the books' lock nothing may fail."""
        item, cost = self._stage(item)
        if item.digest != entry.digest:
            raise ConnectorError("the media has changed since it was hashed", "media", retryable=True)
        if item.num_tokens != entry.num_tokens:
            raise ConnectorError(
                f"its dimensions promise {entry.num_tokens} tokens; preprocessed it has {item.num_tokens}",
                "mismatch",
                retryable=False,
            )
        if not (math.isfinite(cost) and cost >= 0 and item.num_bytes >= 0):
            raise ValueError(f"predict_cost: expected a number of at least 0; got {cost}")
        return item, float(cost)


R = TypeVar("R")


def _attempt(kind: str, work: Callable[..., R], *given: object) -> R | ConnectorError:
    """The result of work on one item, or its failure: what ends a thread elsewhere must not end this one."""
    try:
        return work(*given)
    except BaseException as error:
        return failure_of(error, kind)


def _check_prompt(request: EncodeRequest, counts: Sequence[int]) -> None:
    """InputError: a request's prompt has not the placeholders that its items need."""
    if request.placeholders is not None:
        request.placeholders.merged_length(counts)
