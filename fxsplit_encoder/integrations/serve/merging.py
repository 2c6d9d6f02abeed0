"""The one thread that encodes in a replica: whatever has come while it was busy, it encodes together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from fxsplit_encoder.integrations.images import PreparedImage, Result

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
