"""CPU workers: threads that hash, decode and preprocess media."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fxsplit_encoder.connector.books.preparation import Digested, DigestJob, PrepareJob
from fxsplit_encoder.connector.failures import failure_of
from fxsplit_encoder.connector.seams import MediaProcessor, MediaReducer, PreparedItem
from fxsplit_encoder.connector.threads.core import Core
from fxsplit_encoder.errors import ConnectorError


class Preparers:
    """Some threads that do what the books have for them, each one thing at a time.

    Args:
        core: the books.
        processor: does the work.
        stage: a preprocessed item as its encoder reads it soonest, and what encoding it costs.
        num_threads: how many.
    """

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
            if isinstance(job, DigestJob):
                self._digest(job)
            else:
                self._prepare(job)

    def _take(self) -> DigestJob | PrepareJob | None:
        with self._core.lock:
            while not self._core.is_stopping:
                if (job := self._core.books.preparation.take()) is not None:
                    return job
                self._core.cpu_work.wait()
        return None

    def _digest(self, job: DigestJob) -> None:
        result: Digested | ConnectorError
        try:
            result = self._reduced(job) if job.reduction else self._digested(job)
        except Exception as error:
            result = failure_of(error, "media")
        with self._core.change() as books:
            books.preparation.digested(job, result)

    def _digested(self, job: DigestJob) -> Digested:
        return Digested(job.media, job.item.num_tokens, self._processor.digest(job.media))

    def _reduced(self, job: DigestJob) -> Digested:
        assert isinstance(self._processor, MediaReducer) and job.reduction is not None
        media = self._processor.reduce(job.media, job.reduction)
        num_tokens = self._processor.count_tokens(media) if media is not None else job.item.num_tokens
        if media is None or num_tokens >= job.item.num_tokens:
            raise ConnectorError(
                "memory ran out, and it has no more to give", "out_of_memory", retryable=True
            )
        return Digested(media, num_tokens, self._processor.digest(media))

    def _prepare(self, job: PrepareJob) -> None:
        started, cost = time.monotonic(), 0.0
        result: PreparedItem | ConnectorError
        try:
            result = self._processor.prepare(job.media)
        except Exception as error:
            result = failure_of(error, "media")
        else:
            try:
                result, cost = self._stage(result)
            except Exception as error:
                result = failure_of(error, "encoder")
        with self._core.change() as books:
            books.parts.stats.prepare.add(time.monotonic() - started)
            books.preparation.prepared(job, result, cost)
