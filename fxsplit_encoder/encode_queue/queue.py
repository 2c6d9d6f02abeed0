"""`EncodeQueue`: batches of items for workers, a future for each; halves of what fails; workers given up."""

from __future__ import annotations

import atexit
import heapq
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fxsplit_encoder.encode_queue.batch_thread import EXIT_SECONDS, BatchThread, Clock, deadline_of, join
from fxsplit_encoder.encode_queue.fair_queue import FairQueue, Shares
from fxsplit_encoder.errors import (
    EncoderLostError,
    InputError,
    QueueClosedError,
    QueueFullError,
    QueueTimeoutError,
)

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class BatchHandle(Protocol[ResultT_co]):
    """A batch that was launched."""

    def wait(self) -> Sequence[ResultT_co | Exception]:
        """Wait for the result of each item, in order, or why it has none; called once, on any thread.

        An error concerns the batch, which is split; `BatchThread.FATAL` ones end the worker.
        """
        ...


Launch = Callable[[Sequence[ItemT]], BatchHandle[ResultT]]


@dataclass
class QueueStats:
    """Counts of a queue, in items unless it says otherwise."""

    waiting: int = 0
    """Now."""
    running: int = 0
    """In batches, now."""
    batches: int = 0
    """Batches that were taken, halves not among them."""
    bisections: int = 0
    """Batches that failed and were halved."""
    encoded: int = 0
    failed: int = 0
    expired: int = 0
    """Not taken before their deadlines."""
    cancelled: int = 0
    refused: int = 0
    """Not accepted, since too many waited."""
    lost_workers: int = 0
    """Workers that a fault ended or that hung."""


@dataclass(eq=False)
class _Item:
    value: Any
    cost: float
    tenant: str
    future: Future[Any]
    deadline: float = math.inf
    num_losses: int = 0
    """Workers that were lost while they had it."""


@dataclass(eq=False)
class _Batch:
    items: list[_Item]
    begin: float = 0.0
    """When its worker took it."""
    handle: BatchHandle[Any] | None = None


BATCHES_IN_FLIGHT = 2
"""Batches that a worker has in hand: its device computes one while the host launches the next."""

MOST_LOSSES = 2
"""Workers that an item may cost before it is taken for the cause."""


class EncodeQueue(Generic[ItemT, ResultT]):
    """A bounded queue of items that workers encode in batches, with a future for each.

    A free worker takes what waits, as far as costs allow: first of the tenant that has had the least work,
    then in order of arrival. InputError: a limit is not positive.

    Args:
        max_batch_cost: of the items of a batch together; one that costs more goes alone.
        max_items: that may wait; None: any number. Tenants have `Shares` of them.
        hang_timeout_s: seconds after which a worker that has not landed a batch is given up; None: never.
    """

    def __init__(
        self,
        max_batch_cost: float,
        max_items: int | None = None,
        *,
        hang_timeout_s: float | None = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = {"max_batch_cost": max_batch_cost, "max_items": max_items, "hang_timeout_s": hang_timeout_s}
        for name, limit in limits.items():
            if limit is not None and not limit > 0:
                raise InputError(f"{name}: expected a positive number; got {limit}")
        self._max_batch_cost = max_batch_cost
        self._max_items = max_items
        self._longest = math.inf if hang_timeout_s is None else hang_timeout_s
        self.clock = clock
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        """Told whenever a worker may have something to do, or an item is over."""
        self._waiting: FairQueue[_Item] = FairQueue()
        self._shares = Shares()
        """Items that wait, by tenant."""
        self._again: deque[_Batch] = deque()
        """Batches ahead of all that waits: halves of failed ones, items of lost workers."""
        self._deadlines: list[tuple[float, int, _Item]] = []
        self._num_submitted = 0
        self._workers: list[_QueueWorker] = []
        self._is_closed = False
        self._counts = QueueStats()
        self._clock = Clock(self.lock, self._next_deadline, self._expire, clock, "encode-queue-clock")
        self._clock.thread.start()
        self._at_exit = partial(self.close, drain=False, timeout_s=EXIT_SECONDS)
        atexit.register(self._at_exit)

    # --- workers

    def add_worker(
        self,
        launch: Launch[ItemT, ResultT],
        start: Callable[[], None] | None = None,
        close: Callable[[], None] | None = None,
    ) -> Future[None]:
        """Start a worker, whose thread alone calls `start`, `launch` and `close`. The future is done once
        `start` is, or has its error.
        """
        with self.lock:
            if self._is_closed:
                raise QueueClosedError("the queue is closed")
            name = f"encode-queue-{len(self._workers) + self._counts.lost_workers}"
            worker = _QueueWorker(name, self, launch, start, close)
            self._workers.append(worker)
        worker.thread.start()
        return worker.started

    @property
    def is_alive(self) -> bool:
        """Whether it takes items: it is open, and not all of its workers were lost."""
        with self.lock:
            return not self._is_closed and bool(self._workers or not self._counts.lost_workers)

    # --- items

    def submit(
        self,
        item: ItemT,
        cost: float = 1.0,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> Future[ResultT]:
        """Add an item.

        Args:
            tenant: whose turns it uses.
            timeout_s: seconds within which a worker has to take it; None: any.

        Returns:
            Its result. It can be cancelled until a worker takes it. The errors are the item's own, or
            `QueueTimeoutError`; `EncoderLostError`: no worker is left, or the item cost two of them.

        Raises:
            QueueFullError: too many items wait.
            QueueClosedError: the queue is closed.
            EncoderLostError: every worker was lost.
            InputError: the cost or the timeout is not a positive number.
        """
        if not (math.isfinite(cost) and cost >= 0):
            raise InputError(f"cost: expected a number of at least 0; got {cost}")
        if timeout_s is not None and not timeout_s > 0:
            raise InputError(f"timeout_s: expected a positive number; got {timeout_s}")
        entry = _Item(item, cost, tenant, Future())
        with self.lock:
            self._check_open(tenant)
            self._num_submitted += 1
            self._waiting.push(entry, None, cost, tenant)
            self._shares.change(tenant, 1)
            if timeout_s is not None:
                entry.deadline = self.clock() + timeout_s
                heapq.heappush(self._deadlines, (entry.deadline, self._num_submitted, entry))
                self._clock.look()
            self.work.notify_all()
        entry.future.add_done_callback(lambda done: self._forget(entry) if done.cancelled() else None)
        return entry.future

    def submit_batch(self, items: Sequence[ItemT]) -> list[Future[ResultT]]:
        """Add a batch that is launched as it is, ahead of items that wait; it cannot be cancelled."""
        batch = _Batch([_Item(item, 0.0, "", Future()) for item in items])
        for entry in batch.items:
            entry.future.set_running_or_notify_cancel()
        with self.lock:
            self._check_open("")
            self._again.append(batch)
            self._counts.batches += 1
            self.work.notify_all()
        return [entry.future for entry in batch.items]

    def _check_open(self, tenant: str) -> None:
        if self._is_closed:
            raise QueueClosedError("the queue is closed")
        if self._counts.lost_workers and not self._workers:
            raise EncoderLostError("every worker was lost")
        shares, most = self._shares, self._max_items
        if most is not None and shares.is_refused(tenant, 1, most):
            self._counts.refused += 1
            raise QueueFullError(f"{shares.used} items wait, and max_items is {most}; submit it later")

    def _forget(self, entry: _Item) -> None:
        """An item was cancelled."""
        with self.lock:
            if self._drop(entry):
                entry.future.set_running_or_notify_cancel()  # else `concurrent.futures.wait` goes on
                self._counts.cancelled += 1
                self.work.notify_all()

    def _drop(self, entry: _Item) -> bool:
        """An item waits no more; False: nor did it. Called with the lock."""
        was_there = self._waiting.discard(entry)
        self._shares.change(entry.tenant, -was_there)
        return was_there

    def stats(self) -> QueueStats:
        """The counts so far."""
        with self.lock:
            running = sum(len(batch.items) for worker in self._workers for batch in worker.batches)
            again = sum(len(batch.items) for batch in self._again)
            return replace(self._counts, waiting=len(self._waiting) + again, running=running)

    def close(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more items, and end the workers; idempotent. With `drain` what waits is encoded, else it is
        cancelled; workers that take longer than `timeout_s` are left to themselves.
        """
        deadline = deadline_of(timeout_s)
        with self.lock:
            self._is_closed = True
            dropped = [] if drain and self._workers else list(self._waiting)
            for entry in dropped:
                self._drop(entry)
            if not self._workers:
                dropped += [entry for batch in self._again for entry in batch.items]
                self._again.clear()
            self._counts.cancelled += len(dropped)
            self.work.notify_all()
        for entry in dropped:
            if entry.future.cancel():
                entry.future.set_running_or_notify_cancel()
            else:  # of a batch that cannot be cancelled
                entry.future.set_exception(QueueClosedError("the queue was closed before it had a worker"))
        join([worker.thread for worker in list(self._workers)], deadline)
        with self.lock:
            self._clock.stop()
        self._clock.thread.join()
        atexit.unregister(self._at_exit)

    # --- batches, for the workers

    def take(self, worker: _QueueWorker) -> _Batch | None:
        """The next batch of a worker; None: there is none, or it has enough. Called with the lock."""
        if worker not in self._workers or len(worker.batches) >= BATCHES_IN_FLIGHT:
            return None
        if self._again:
            batch = self._again.popleft()
        else:
            batch = _Batch(self._choose())
            if not batch.items:
                return None
            self._counts.batches += 1
        batch.begin = self.clock()
        worker.batches[batch] = None
        self._clock.look()
        return batch

    def _choose(self) -> list[_Item]:
        chosen: list[_Item] = []
        cost, now = 0.0, self.clock()
        # The clock is about to fail what is late.
        while (entry := next((each for each in self._waiting if now < each.deadline), None)) is not None:
            if chosen and cost + entry.cost > self._max_batch_cost:
                break
            self._waiting.take(entry)
            self._shares.change(entry.tenant, -1)
            if entry.future.set_running_or_notify_cancel():
                chosen.append(entry)
                cost += entry.cost
            else:
                self._counts.cancelled += 1
        return chosen

    def is_done(self, worker: _QueueWorker) -> bool:
        """Whether a worker has nothing to take any more; called with the lock."""
        others = any(each.batches for each in self._workers)  # which may fail, and come again in halves
        is_empty = not (self._again or self._waiting or others)
        return worker not in self._workers or (self._is_closed and is_empty)

    def finish(self, worker: _QueueWorker, batch: _Batch, results: Sequence[Any]) -> None:
        """Publish the results of a batch, unless its worker was given up."""
        with self.lock:
            if not worker.end(batch):
                return
            num_failed = sum(isinstance(result, Exception) for result in results)
            self._counts.failed += num_failed
            self._counts.encoded += len(results) - num_failed
            self.work.notify_all()
        for entry, result in zip(batch.items, results, strict=True):
            if isinstance(result, Exception):
                entry.future.set_exception(result)
            else:
                entry.future.set_result(result)

    def fail(self, worker: _QueueWorker, batch: _Batch, error: Exception) -> None:
        """Have a batch that failed launched again in halves, unless an item is to blame."""
        if len(batch.items) == 1:
            self.finish(worker, batch, [error])
            return
        with self.lock:
            if worker.end(batch):
                self._counts.bisections += 1
                middle = len(batch.items) // 2
                halves = (batch.items[middle:], batch.items[:middle])
                self._again.extendleft(map(_Batch, halves))
                self.work.notify_all()

    def lose(self, worker: _QueueWorker, why: str) -> None:
        """Give a worker up; what it had goes to others, one item at a time, or fails."""
        failed = []
        with self.lock:
            if worker not in self._workers:
                return
            self._workers.remove(worker)
            self._counts.lost_workers += 1
            for entry in [entry for batch in worker.batches for entry in batch.items]:
                entry.num_losses += 1
                if entry.num_losses < MOST_LOSSES and self._workers:
                    self._again.append(_Batch([entry]))
                else:
                    failed.append(entry)
            worker.batches.clear()
            if not self._workers:
                failed += [entry for batch in self._again for entry in batch.items]
                self._again.clear()
                for entry in list(self._waiting):
                    self._drop(entry)
                    if entry.future.set_running_or_notify_cancel():
                        failed.append(entry)
            self._counts.failed += len(failed)
            self.work.notify_all()
        for entry in failed:
            entry.future.set_exception(EncoderLostError(f"{worker.name} was lost: {why}"))

    # --- time

    def _next_deadline(self) -> float:
        while self._deadlines and self._deadlines[0][2] not in self._waiting:
            heapq.heappop(self._deadlines)
        first = self._deadlines[0][0] if self._deadlines else math.inf
        begins = (batch.begin for worker in self._workers for batch in worker.batches)
        return min(first, min(begins, default=math.inf) + self._longest)

    def _expire(self) -> None:
        with self.lock:
            now = self.clock()
            expired = []
            while self._deadlines and self._deadlines[0][0] <= now:
                entry = heapq.heappop(self._deadlines)[2]
                if self._drop(entry) and entry.future.set_running_or_notify_cancel():
                    expired.append(entry)
            self._counts.expired += len(expired)
            self.work.notify_all()
            late = now - self._longest
            hung = [each for each in self._workers if any(batch.begin <= late for batch in each.batches)]
        for entry in expired:
            entry.future.set_exception(QueueTimeoutError("no worker has taken it within its timeout"))
        for worker in hung:
            logger.warning("%s has not landed a batch for %g s, and is given up", worker.name, self._longest)
            self.lose(worker, f"it has not landed a batch for {self._longest:g} s")


class _QueueWorker(BatchThread[_Batch]):
    """A worker of an `EncodeQueue`."""

    def __init__(
        self,
        name: str,
        source: EncodeQueue[Any, Any],
        launch: Launch[Any, Any],
        start: Callable[[], None] | None,
        close: Callable[[], None] | None,
    ) -> None:
        super().__init__(name, source.work)
        self._source = source
        self._launch, self._start, self._close = launch, start or (lambda: None), close or (lambda: None)
        self.started: Future[None] = Future()
        self.batches: dict[_Batch, None] = {}
        """Those that it has taken and that have not landed."""

    def end(self, batch: _Batch) -> bool:
        """It has a batch no more; False: nor had it, since it was given up. Called with the lock."""
        return self.batches.pop(batch, False) is None

    @contextmanager
    def serving(self) -> Iterator[None]:
        self._start()
        self.started.set_result(None)
        yield

    def take(self) -> _Batch | None:
        with self.work:
            while True:
                self.check()
                if (batch := self._source.take(self)) is not None or self._source.is_done(self):
                    return batch
                self.work.wait()

    def launch(self, batch: _Batch) -> None:
        batch.handle = self._launch([entry.value for entry in batch.items])

    def split(self, batch: _Batch, error: Exception) -> Sequence[_Batch]:
        self._source.fail(self, batch, error)
        return []

    def land(self, batch: _Batch) -> None:
        assert batch.handle is not None
        handle, batch.handle = batch.handle, None
        try:
            results = handle.wait()
            if len(results) != len(batch.items):
                raise RuntimeError(f"expected {len(batch.items)} results of a batch; got {len(results)}")
        except self.FATAL:
            raise
        except Exception as error:
            self._source.fail(self, batch, error)
        else:
            self._source.finish(self, batch, results)

    def lost(self, error: BaseException) -> None:
        if not self.started.done():
            self.started.set_exception(error)
        self._source.lose(self, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._close()
