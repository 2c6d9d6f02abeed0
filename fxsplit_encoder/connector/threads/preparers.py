"""CPU workers: threads that read headers of media, hash, decode and preprocess them."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fxsplit_encoder.connector.books.preparation import Digested, DigestJob, Problem
from fxsplit_encoder.connector.books.tickets import Entry, Ticket, capacity_of
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
        while self._run_next():  # which keeps no media of a job while it waits for the next
            pass

    def _run_next(self) -> bool:
        job = self._take()
        if isinstance(job, Ticket):
            self._count(job)
        elif isinstance(job, DigestJob):
            self._digest(job)
        elif job is not None:
            self._prepare(job)
        return job is not None

    def _take(self) -> Ticket | DigestJob | Entry | None:
        with self._core.lock:
            while not self._core.books.is_closed:
                if (job := self._core.books.preparation.take()) is not None:
                    return job
                self._core.cpu_work.wait()
        return None

    def _count(self, ticket: Ticket) -> None:
        counts = [0] * len(ticket.items)
        problem = self._read_headers(ticket.request, counts)
        with self._core.change() as books:
            books.preparation.counted(ticket, counts, problem)

    def _read_headers(self, request: EncodeRequest, counts: list[int]) -> Problem | None:
        """Fill in the tokens of each item; why the request cannot be served, if it cannot."""
        config = self._core.config
        sizes: dict[int, int] = {}
        for index, item in enumerate(request.items):
            size = _attempt("media", self._counted, item, index, counts)
            if isinstance(size, ConnectorError):
                return Problem(index, size)
            if size > config.staging_bytes:
                message = f"its feature has {size} bytes, and staging_bytes is {config.staging_bytes}"
                return Problem(index, ConnectorError(message, "too_large", retryable=False))
            sizes[id(item)] = capacity_of(size)
        if (total := sum(sizes.values())) > config.host_bytes:
            message = f"its request takes {total} bytes, and host_bytes is {config.host_bytes}"
            return Problem(0, ConnectorError(message, "too_large", retryable=False))
        error = _prompt_problem(request, counts)
        return None if error is None else Problem(0, error, is_of_item=False)

    def _counted(self, item: MediaItem, index: int, counts: list[int]) -> int:
        """Bytes of an item's feature, and in its place the tokens that it has."""
        if (row_bytes := self._core.books.holdings.row_bytes(item.modality)) is None:
            raise MediaError(f"no encoder takes {shown(item.modality)}")
        counts[index] = _checked_count(self._processor.count_tokens(item))
        return counts[index] * row_bytes

    def _digest(self, job: DigestJob) -> None:
        result = _attempt("media", self._digested, job)
        with self._core.change() as books:
            books.preparation.digested(job, result)

    def _digested(self, job: DigestJob) -> Digested:
        media, num_tokens = job.media, job.item.num_tokens
        if job.reduction is not None:
            media, num_tokens = self._reduced(job, job.reduction)
        digest: object = self._processor.digest(media)
        if not isinstance(digest, bytes):
            raise TypeError(f"digest: expected bytes of the processor; got {shown(digest)}")
        return Digested(media, num_tokens, digest)

    def _reduced(self, job: DigestJob, how: Reduction) -> tuple[MediaItem, int]:
        media = self._processor.reduce(job.media, how)
        num_tokens = job.item.num_tokens
        if media is not None:
            num_tokens = _checked_count(self._processor.count_tokens(media))
        if media is None or num_tokens >= job.item.num_tokens:
            raise ConnectorError(
                "memory ran out, and it has no more to give", "out_of_memory", retryable=True
            )
        counts = [num_tokens if item is job.item else item.num_tokens for item in job.ticket.items]
        if (error := _prompt_problem(job.ticket.request, counts)) is not None:
            raise error
        return media, num_tokens

    def _prepare(self, entry: Entry) -> None:
        started = time.monotonic()
        assert entry.media is not None
        prepare, cost = self._processor.prepare, 0.0
        result = _attempt("media", lambda media: _checked_item(prepare(media)), entry.media)
        if not isinstance(result, ConnectorError):
            staged = _attempt("encoder", self._staged, result)
            result, cost = (staged, 0.0) if isinstance(staged, ConnectorError) else staged
        with self._core.change() as books:
            books.holdings.stats.prepare.add(time.monotonic() - started)
            books.preparation.prepared(entry, result, cost)

    def _staged(self, item: PreparedItem) -> tuple[PreparedItem, float]:
        item, cost = self._stage(item)
        return _checked_item(item), _checked_cost(cost)


R = TypeVar("R")


def _attempt(kind: str, work: Callable[..., R], *given: object) -> R | ConnectorError:
    """The result of work on one item, or its failure: what ends a thread elsewhere must not end this one."""
    try:
        return work(*given)
    except BaseException as error:
        return failure_of(error, kind)


def _prompt_problem(request: EncodeRequest, counts: Sequence[int]) -> ConnectorError | None:
    """Why a request's prompt has not the placeholders that its items need, if it has not."""
    if request.placeholders is None:
        return None
    length = _attempt("mismatch", request.placeholders.merged_length, counts)
    return length if isinstance(length, ConnectorError) else None


def _checked_count(count: object) -> int:
    """A processor's count as an integer; TypeError or ValueError: it is none of at least 0."""
    if isinstance(count, bool):
        raise TypeError(f"count_tokens: expected an integer of the processor; got {shown(count)}")
    number = operator.index(count)  # type: ignore[arg-type]
    if number < 0:
        raise ValueError(f"count_tokens: expected at least 0 of the processor; got {number}")
    return number


def _checked_item(item: object) -> PreparedItem:
    """An item whose bytes can be counted: the books do so under their lock, where nothing may fail."""
    if not isinstance(item, PreparedItem):
        raise TypeError(f"prepare: expected a PreparedItem; got {shown(item)}")
    return item


def _checked_cost(cost: object) -> float:
    number = float(cost)  # type: ignore[arg-type]
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"predict_cost: expected a number of at least 0; got {number}")
    return number
