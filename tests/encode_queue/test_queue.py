"""The queue under everything that encodes in batches: order, bounds, halves, deadlines, lost workers."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.encode_queue.fair_queue import FairQueue
from fxsplit_encoder.encode_queue.queue import EncodeQueue
from fxsplit_encoder.errors import (
    EncoderLostError,
    InputError,
    QueueClosedError,
    QueueFullError,
    QueueTimeoutError,
)

PATIENCE_S = 60.0


class Worker:
    """Encodes numbers by doubling them, once it is let; some of them fail."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.faults: dict[int, BaseException] = {}
        """What launching a batch with a number raises."""
        self.late_faults: dict[int, BaseException] = {}
        """What waiting for it raises."""
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        if is_open:
            self.gate.set()

    def launch(self, items: Sequence[int]) -> Handle:
        self.batches.append(list(items))
        self.entered.release()
        assert self.gate.wait(PATIENCE_S)
        _raise(self.faults, items)
        return Handle(self, list(items))

    def wait_for_batch(self) -> list[int]:
        assert self.entered.acquire(timeout=PATIENCE_S)
        return self.batches[-1]


@dataclass
class Handle:
    worker: Worker
    items: list[int]

    def wait(self) -> list[Any]:
        _raise(self.worker.late_faults, self.items)
        return [2 * item if item >= 0 else ValueError(str(item)) for item in self.items]


def _raise(faults: dict[int, BaseException], items: Sequence[int]) -> None:
    for item in items:
        if item in faults:
            raise faults[item]


def queue_of(*workers: Worker, cost: float = 100.0, **settings: Any) -> EncodeQueue[int, int]:
    queue: EncodeQueue[int, int] = EncodeQueue(cost, **settings)
    for worker in workers:
        queue.add_worker(worker.launch).result(PATIENCE_S)
    return queue


def busy(**settings: Any) -> tuple[EncodeQueue[int, int], Worker, Future[int]]:
    """A queue whose worker is kept busy by a first item until its gate opens."""
    worker = Worker(is_open=False)
    queue = queue_of(worker, **settings)
    first = queue.submit(0)
    worker.wait_for_batch()
    return queue, worker, first


def results(futures: Sequence[Future[int]]) -> list[Any]:
    return [future.exception(PATIENCE_S) or future.result() for future in futures]


def test_what_waits_is_encoded_together_as_far_as_costs_allow() -> None:
    queue, worker, first = busy(cost=5.0)
    futures = [queue.submit(n, cost) for n, cost in enumerate([2, 2, 2, 9, 1, 1, 1, 1], start=1)]
    worker.gate.set()
    assert results([first, *futures]) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    queue.close()
    assert worker.batches == [[0], [1, 2], [3], [4], [5, 6, 7, 8]]
    stats = queue.stats()
    assert (stats.batches, stats.encoded, stats.waiting, stats.running) == (5, 9, 0, 0)


def test_a_batch_may_be_submitted_whole_and_goes_before_what_waits() -> None:
    queue, worker, first = busy()
    worker.faults = {4: InputError("4")}
    waiting, futures = queue.submit(1), queue.submit_batch([2, 3, 4])
    assert not futures[0].cancel()
    worker.gate.set()
    assert [str(each) for each in results([first, waiting, *futures])] == ["0", "2", "4", "6", "4"]
    assert worker.batches == [[0], [2, 3, 4], [2], [3, 4], [3], [4], [1]]
    assert (queue.stats().batches, queue.stats().bisections) == (3, 2)
    queue.close()
    with pytest.raises(QueueClosedError):
        queue.submit_batch([5])
    queue = queue_of()
    (future,) = queue.submit_batch([1])  # for which no worker comes
    queue.close()
    assert isinstance(future.exception(PATIENCE_S), QueueClosedError)
    assert (queue.stats().cancelled, queue.stats().waiting) == (1, 0)


def test_tenants_are_served_in_turn() -> None:
    queue, worker, _ = busy(cost=1.0)
    for number in (1, 2, 3):
        queue.submit(number, tenant="a")
    queue.submit(4, tenant="b")
    queue.submit(5, tenant="c")
    worker.gate.set()
    queue.close()
    assert worker.batches == [[0], [1], [4], [5], [2], [3]]


def test_a_batch_is_launched_while_another_is_waited_for() -> None:
    held, launched = threading.Event(), threading.Semaphore(0)

    class Slow:
        def wait(self) -> list[int]:
            assert held.wait(PATIENCE_S)
            return [1]

    def launch(items: Sequence[int]) -> Slow:
        launched.release()
        return Slow()

    queue: EncodeQueue[int, int] = EncodeQueue(1.0)
    queue.add_worker(launch)
    futures = [queue.submit(n) for n in range(3)]
    assert launched.acquire(timeout=PATIENCE_S) and launched.acquire(timeout=PATIENCE_S)
    assert not launched.acquire(timeout=0.05), "two batches are in flight already"
    held.set()
    assert results(futures) == [1, 1, 1]
    queue.close()


@pytest.mark.parametrize("faults", ["faults", "late_faults"])
def test_a_batch_that_fails_is_halved_until_the_guilty_is_alone(faults: str) -> None:
    queue, worker, _ = busy()
    futures = [queue.submit(n) for n in range(1, 9)]
    error = RuntimeError("bad")
    getattr(worker, faults)[3] = error
    worker.gate.set()
    assert results(futures) == [2, 4, error, 8, 10, 12, 14, 16]
    queue.close()
    assert sorted(map(len, worker.batches)) == sorted([1, 8, 4, 2, 2, 1, 1, 4])
    stats = queue.stats()
    assert (stats.bisections, stats.failed, stats.encoded, stats.batches) == (3, 1, 8, 2)


def test_an_item_may_have_an_error_of_its_own_and_results_have_to_be_as_many() -> None:
    worker = Worker()
    with_error = queue_of(worker)
    assert isinstance(with_error.submit(-1).exception(PATIENCE_S), ValueError)
    with_error.close()
    queue: EncodeQueue[int, int] = EncodeQueue(1.0)
    queue.add_worker(lambda items: Handle(worker, [*items, 1]))
    with pytest.raises(RuntimeError, match="expected 1 results of a batch; got 2"):
        queue.submit(1).result(PATIENCE_S)
    queue.close()


def test_an_item_can_be_cancelled_until_it_is_taken() -> None:
    queue, worker, first = busy(max_items=2)
    second, third = queue.submit(1), queue.submit(2)
    assert (first.cancel(), second.cancel()) == (False, True)
    queue.submit(3)  # there is room again
    worker.gate.set()
    assert (wait([second], 0).done, third.result(PATIENCE_S)) == ({second}, 4)
    queue.close()
    assert worker.batches == [[0], [2, 3]]
    assert queue.stats().cancelled == 1


def test_a_queue_is_bounded_and_no_tenant_fills_it_for_others() -> None:
    queue = queue_of(max_items=4)
    for number in range(4):
        queue.submit(number, tenant="a")
    with pytest.raises(QueueFullError, match="4 items wait, and max_items is 4") as caught:
        queue.submit(5, tenant="a")
    assert caught.value.retryable
    for number in range(2):
        queue.submit(number, tenant="b")
    for tenant in ("a", "b"):
        with pytest.raises(QueueFullError):
            queue.submit(6, tenant=tenant)
    for tenant in "cd":
        queue.submit(7, tenant=tenant)
    with pytest.raises(QueueFullError):
        queue.submit(8, tenant="e")
    assert (queue.stats().waiting, queue.stats().refused) == (8, 4)
    queue.close(drain=False)


@pytest.mark.parametrize("is_taken_late", [False, True])
def test_what_is_not_taken_in_time_expires(is_taken_late: bool) -> None:
    now = [0.0]
    queue, worker, first = busy(clock=lambda: now[0], hang_timeout_s=None)
    late, patient = queue.submit(1, timeout_s=1.0), queue.submit(2)
    now[0] = 2.0
    if not is_taken_late:
        queue.submit(3, timeout_s=0.5)  # which has the clock look at once
        now[0] = 3.0
        queue.submit(4, timeout_s=0.25)
    worker.gate.set()
    with pytest.raises(QueueTimeoutError, match="no worker has taken it within its timeout"):
        late.result(PATIENCE_S)
    assert results([first, patient]) == [0, 4]
    queue.close()
    assert 1 not in worker.batches[1]
    assert queue.stats().expired >= 1


def test_the_clock_expires_items_by_itself() -> None:
    queue = queue_of()
    with pytest.raises(QueueTimeoutError):
        queue.submit(1, timeout_s=0.01).result(PATIENCE_S)
    assert (queue.stats().expired, queue.stats().waiting) == (1, 0)
    queue.close()


class Killed(BaseException):
    """Nothing expects it."""


@pytest.mark.parametrize("fault", [Killed(), EncoderLostError("gone"), torch.AcceleratorError("broken")])
@pytest.mark.parametrize("faults", ["faults", "late_faults"])
def test_the_items_of_a_lost_worker_go_to_another_alone(fault: BaseException, faults: str) -> None:
    queue, dying, first = busy()
    getattr(dying, faults)[0] = fault
    futures = [first, *(queue.submit(n) for n in (1, 2))]
    queue.add_worker(Worker().launch)
    dying.gate.set()
    assert results(futures) == [0, 2, 4]
    assert queue.is_alive and queue.stats().lost_workers == 1
    queue.close()


class Pixels:
    """An item whose memory matters."""


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_that_a_log_handler_keeps_keeps_no_batch(
    caplog: pytest.LogCaptureFixture, is_late: bool
) -> None:
    class Lost:
        def wait(self) -> list[Any]:
            raise Killed

    def launch(items: Sequence[Pixels]) -> Lost:
        pixels = items[0]
        if not is_late:
            raise EncoderLostError(f"with {pixels}")
        return Lost()

    queue: EncodeQueue[Pixels, int] = EncodeQueue(8)
    item = Pixels()
    kept = weakref.ref(item)
    future = queue.submit(item)
    del item
    queue.add_worker(launch)
    with pytest.raises(EncoderLostError):
        future.result(PATIENCE_S)
    queue.close()
    del future
    gc.collect()
    assert any(record.exc_info for record in caplog.records)
    assert kept() is None


def test_an_item_that_costs_two_workers_fails_and_so_does_all_when_none_is_left() -> None:
    workers = [Worker(is_open=False) for _ in range(3)]
    queue = queue_of(workers[0])
    for worker in workers:
        worker.faults[7] = Killed()
    poison = queue.submit(7)
    workers[0].wait_for_batch()
    queue.add_worker(workers[1].launch).result(PATIENCE_S)
    for worker in workers:
        worker.gate.set()
    assert isinstance(poison.exception(PATIENCE_S), EncoderLostError)
    assert not queue.is_alive
    with pytest.raises(EncoderLostError, match="every worker was lost"):
        queue.submit(1)
    workers[2].faults.clear()
    queue.add_worker(workers[2].launch)
    assert queue.submit(1).result(PATIENCE_S) == 2
    queue.close()


def test_a_worker_that_does_not_start_tells_its_caller_and_fails_what_waits() -> None:
    queue = queue_of()
    waiting = queue.submit(1)

    started = queue.add_worker(Worker().launch, start=mock.Mock(side_effect=InputError("no such device")))
    assert str(started.exception(PATIENCE_S)) == "no such device"
    with pytest.raises(EncoderLostError, match="no such device"):
        waiting.result(PATIENCE_S)
    queue.close()


def test_a_worker_that_hangs_is_given_up_and_its_results_do_not_count() -> None:
    queue, hanging, future = busy(hang_timeout_s=0.05)
    healthy = Worker()
    queue.add_worker(healthy.launch)
    assert future.result(PATIENCE_S) == 0
    assert healthy.batches == [[0]]
    assert queue.stats().lost_workers == 1
    hanging.gate.set()
    assert queue.submit(2).result(PATIENCE_S) == 4
    queue.close()
    assert (queue.stats().encoded, hanging.batches) == (2, [[0]])


@pytest.mark.parametrize("drain", [True, False])
def test_closing_encodes_or_cancels_what_waits(drain: bool) -> None:
    worker, closed = Worker(is_open=False), []
    queue: EncodeQueue[int, int] = EncodeQueue(1.0)
    queue.add_worker(worker.launch, close=lambda: closed.append(threading.current_thread().name))
    first = queue.submit(0)
    worker.wait_for_batch()
    second = queue.submit(1)
    threading.Timer(0.05, worker.gate.set).start()
    queue.close(drain=drain)
    assert first.result(0) == 0
    assert wait([second], 0).done and second.cancelled() is not drain
    assert len(closed) == 1 and not queue.is_alive
    with pytest.raises(QueueClosedError):
        queue.submit(1)
    with pytest.raises(QueueClosedError):
        queue.add_worker(worker.launch)
    queue.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"cost": -1.0}, "cost"), ({"cost": float("nan")}, "cost"), ({"timeout_s": 0.0}, "timeout_s")],
)
def test_what_cannot_be_counted_is_refused(settings: dict[str, float], message: str) -> None:
    queue = queue_of()
    with pytest.raises(InputError, match=message):
        queue.submit(1, **settings)  # type: ignore[arg-type]
    queue.close()
    with pytest.raises(InputError, match="max_items: expected a positive number; got 0"):
        EncodeQueue(1.0, max_items=0)


def test_every_future_comes_to_its_end_whatever_happens() -> None:
    queue: EncodeQueue[int, int] = EncodeQueue(8.0, max_items=64, hang_timeout_s=None)
    workers = []
    draw = random.Random(0)
    doomed = {draw.randrange(2000): Killed() for _ in range(6)}
    for _ in range(8):
        workers.append(Worker())
        workers[-1].faults = {draw.randrange(2000): RuntimeError("bad") for _ in range(40)}
        workers[-1].late_faults = dict(doomed)
        queue.add_worker(workers[-1].launch)
    futures: list[Future[int]] = []

    def submit(seed: int) -> None:
        own = random.Random(seed)
        for number in range(seed * 500, seed * 500 + 500):
            try:
                future = queue.submit(number, own.random() * 4, str(seed))
            except (QueueFullError, EncoderLostError):
                continue
            futures.append(future)
            if own.random() < 0.1:
                future.cancel()

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.close()
    assert all(future.done() for future in futures)
    stats = queue.stats()
    assert stats.encoded + stats.failed + stats.cancelled == len(futures)
    assert (stats.waiting, stats.running) == (0, 0)


AT_EXIT = """
import time
from fxsplit_encoder.encode_queue import EncodeQueue

class Handle:
    def wait(self):
        time.sleep(0.3)
        print("landed", flush=True)
        return [1]

queue = EncodeQueue(1.0)
queue.add_worker(lambda items: Handle(), close=lambda: print("closed", flush=True)).result()
futures = [queue.submit(n) for n in range(9)]
time.sleep(0.1)
"""


def test_the_interpreter_may_end_while_items_are_encoded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=10 * PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.split()
    assert lines[-1] == "closed" and 1 <= lines.count("landed") <= 3


# --- what is served next, among tenants and flows


def served(queue: FairQueue[str]) -> list[str]:
    order = []
    while (first := queue.first()) is not None:
        assert len(list(queue)) == len(queue)
        queue.take(first)
        order.append(first)
    return order


def test_what_was_served_in_vain_comes_first_and_costs_nothing_again() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", flow="a", cost=5.0)
    queue.push("again", flow="b", cost=50.0, is_first=True)
    assert next(iter(queue)) == "again"
    queue.take("again")
    queue.push("c", flow="b", cost=1.0)
    assert served(queue) == ["c", "a"]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 100.0), st.sampled_from("ptr")), max_size=60))
def test_it_holds_what_was_pushed_and_not_taken(moves: list[tuple[int, float, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    held: dict[int, float] = {}
    for number, (flow, cost, move) in enumerate(moves):
        if move == "p" or not held:
            queue.push(number, flow, cost)
            held[number] = cost
        else:
            thing = next(iter(queue))
            (queue.take if move == "t" else queue.discard)(thing)
            queue.discard(thing)
            del held[thing]
        assert set(queue) == held.keys() and len(queue) == len(held)
        assert queue.cost == (pytest.approx(sum(held.values())) if held else 0.0)


@given(st.lists(st.floats(0.5, 8.0), min_size=2, max_size=40))
def test_flows_that_always_wait_are_served_alike(costs: list[float]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number, cost in enumerate(costs):
        for flow in ("x", "y"):
            queue.push((flow, number), flow, cost if flow == "x" else 1.0)
    work = {"x": 0.0, "y": 0.0}
    longest = max(max(costs), 1.0)
    while len({flow for flow, _ in queue}) == 2:
        thing = next(iter(queue))
        queue.take(thing)
        work[thing[0]] += costs[thing[1]] if thing[0] == "x" else 1.0
        assert abs(work["x"] - work["y"]) <= 2 * longest


def test_a_queue_serves_tenants_alike_whatever_their_number_of_flows() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(6):
        queue.push(f"m{number}", flow=number, cost=1.0, tenant="many")
    queue.push("f0", 0, 2.0, "few")
    queue.push("f1", 0, 1.0, "few")
    queue.push("again", 7, 9.0, "few", is_first=True)
    order = served(queue)
    assert order[0] == "again"
    assert [name for name in order if name[0] == "m"] == [f"m{number}" for number in range(6)]
    assert order.index("f0") <= 2 and order.index("f1") <= 5


def test_what_comes_first_is_in_order_as_a_flow_is() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a1", "a2", "a3"):
        queue.push(name, None, 1.0, "a")
    queue.push("b1", None, 1.0, "b")
    queue.push("a4", None, 5.0, "a", is_first=True)
    queue.push("b2", None, 0.0, "b", is_first=True)
    assert served(queue) == ["a4", "b2", "a1", "b1", "a2", "a3"]
