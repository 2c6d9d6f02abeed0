"""The one thread that encodes in a replica: whatever has come while it was busy, it encodes together."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from ray import serve

from fxsplit_encoder.integrations.images import ImageEncoder, PreparedImage, Result, results_of
from fxsplit_encoder.integrations.prometheus import EncoderMetrics
from fxsplit_encoder.integrations.serve.requests import ServiceSettings

Fetch = Callable[[], list[Result]]
Launch = Callable[[Sequence[PreparedImage]], Fetch]
"""Begins to encode images; what it returns waits for the results."""


@dataclass(eq=False)
class Call:
    """Images that came together."""

    images: Sequence[PreparedImage]
    weight: int
    """Output tokens of all of them."""
    future: Future[list[Result]] = field(default_factory=Future)


class MergingThread:
    """Encodes calls on one thread, in the order that they came.

    Args:
        start: called on the thread; returns what encodes there. Its error is raised here.
        max_weight: of the calls that are encoded together, at most, but for one that has more alone.
        on_failure: called on the thread with an error that concerns every image of a batch.
    """

    def __init__(
        self,
        start: Callable[[], Launch],
        max_weight: Callable[[], int],
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._fetcher = ThreadPoolExecutor(1, "fetcher")
        self._on_failure = on_failure
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(start, max_weight, started), name="encoder")
        self._thread.daemon = True
        self._thread.start()
        started.result()

    @property
    def is_alive(self) -> bool:
        """Whether it still takes calls."""
        return self._thread.is_alive()

    def submit(self, images: Sequence[PreparedImage], weight: int) -> Future[list[Result]]:
        """The results of images, in order. A call that is cancelled before its turn is left out."""
        call = Call(images, weight)
        self._calls.put(call)
        return call.future

    def close(self) -> None:
        """Ends once all that was submitted is done."""
        self._calls.put(None)
        self._thread.join()
        self._fetcher.shutdown()

    def _run(self, start: Callable[[], Launch], max_weight: Callable[[], int], started: Future[None]) -> None:
        try:
            launch, most = start(), max_weight()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        later: Call | None = None
        while (first := later or self._calls.get()) is not None:
            batch, later, is_last = self._gather(first, most)
            self._encode(launch, [call for call in batch if call.future.set_running_or_notify_cancel()])
            if is_last:
                return

    def _gather(self, first: Call, most: int) -> tuple[list[Call], Call | None, bool]:
        """What waits, as far as it fits; then the call that does not, and whether there is an end."""
        batch, weight = [first], first.weight
        while not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return batch, None, True
            if weight + call.weight > most:
                return batch, call, False
            batch.append(call)
            weight += call.weight
        return batch, None, False

    def _encode(self, launch: Launch, batch: Sequence[Call]) -> None:
        if not batch:
            return
        try:
            fetch = launch([image for call in batch for image in call.images])
        except Exception as error:
            self._alone(launch, batch, error)
            return
        self._fetcher.submit(self._finish, batch, fetch)

    def _alone(self, launch: Launch, batch: Sequence[Call], error: Exception) -> None:
        """So that who caused an error is the only one who gets it."""
        if len(batch) == 1:
            self._fail(batch, error)
            return
        for call in batch:
            self._encode(launch, [call])

    def _finish(self, batch: Sequence[Call], fetch: Fetch) -> None:
        try:
            results = fetch()
        except Exception as error:
            self._fail(batch, error)
            return
        start = 0
        for call in batch:
            call.future.set_result(results[start : start + len(call.images)])
            start += len(call.images)

    def _fail(self, batch: Sequence[Call], error: Exception) -> None:
        self._on_failure(error)
        for call in batch:
            call.future.set_exception(error)


_IMAGES_WITHOUT_BUDGET = 16


@dataclass(frozen=True, eq=False)
class _Waiting:
    image: PreparedImage
    weight: int
    """Its output tokens; of one that is larger than a batch, those of a batch."""


class EncoderReplica:
    """One tower, one GPU, one thread that encodes."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._metrics = EncoderMetrics()
        self._broken: str | None = None
        self._thread = MergingThread(self._start, lambda: self._max_tokens, self._note_failure)
        # Ray's queue forms batches as images come, the thread joins those that wait for it.
        self._batched = serve.batch(
            max_batch_size=self._max_tokens,
            batch_wait_timeout_s=settings.batch_wait_s,
            max_concurrent_batches=settings.max_ongoing_requests,
            batch_size_fn=total_weight,
        )(self._encode_batch)

    async def encode(self, images: Sequence[PreparedImage]) -> list[Result]:
        """The embeddings of a request's images, in order; of one that cannot be encoded, the error."""
        weights = [min(self._encoder.count_tokens(image), self._max_tokens) for image in images]
        waiting = [_Waiting(image, weight) for image, weight in zip(images, weights, strict=True)]
        return list(await asyncio.gather(*map(self._batched, waiting)))

    async def describe(self) -> dict[str, Any]:
        """What encodes here."""
        return {
            "device": str(self._encoder.device),
            "dtype": str(self._encoder.dtype).removeprefix("torch."),
            "max_batch_tokens": self._max_tokens,
            "items": self._encoder.manager.stats().items,
        }

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        if self._broken is not None or not self._thread.is_alive:
            raise RuntimeError(f"the encoder cannot go on: {self._broken or 'its thread has ended'}")

    async def _encode_batch(self, waiting: list[_Waiting]) -> list[Result]:
        future = self._thread.submit([each.image for each in waiting], total_weight(waiting))
        return await asyncio.wrap_future(future)

    # --- on the thread

    def _start(self) -> Launch:
        self._encoder = ImageEncoder(self._settings)
        self._max_tokens = self._settings.max_batch_tokens or _largest_budget(self._encoder)
        return self._launch

    def _launch(self, images: Sequence[PreparedImage]) -> Fetch:
        begin = time.perf_counter()
        launched = self._encoder.launch(images)

        def fetch() -> list[Result]:
            results = results_of(launched)
            self._metrics.add_batch(results, time.perf_counter() - begin, self._encoder.manager.stats())
            return results

        return fetch

    def _note_failure(self, error: Exception) -> None:
        if self._encoder.device.type == "cuda":
            try:
                torch.cuda.synchronize(self._encoder.device)
            except RuntimeError:
                self._broken = f"{type(error).__name__}: {error}"


def total_weight(waiting: Sequence[_Waiting]) -> int:
    """Output tokens of a batch."""
    return sum(each.weight for each in waiting)


def _largest_budget(encoder: ImageEncoder) -> int:
    budgets = [budget for path in encoder.manager.budget_graphs.values() for budget in path]
    if budgets:
        return max(budgets)
    image = encoder.preparer.prepare(Image.new("RGB", (448, 448)))
    return _IMAGES_WITHOUT_BUDGET * encoder.count_tokens(image)
