"""Rows that may be read while their device still writes them: whoever reads them waits for it, and if it is
lost only what it had to write is.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fxsplit_encoder.connector.books.audit import audit
from fxsplit_encoder.connector.books.workers import Batch
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.request import EncodeRequest, FailurePolicy
from fxsplit_encoder.connector.states import Residence, State
from fxsplit_encoder.errors import ConnectorError, InputError

from .books.stand_ins import Bench, ManualEvent, Rows
from .books.test_any_history import MEDIA, AnyHistory
from .scenes import PATIENCE_S, SlowCopies, connector, image, prompt, request, rows_of, wait, wait_until
from .test_connector_races import assert_nothing_is_left


class Ahead(SlowCopies):
    """A device whose work is over when it is told to, and who waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.marks_wait = True
        self.waited: list[tuple[Any, torch.device]] = []

    def wait_for(self, events: Any, device: torch.device) -> None:
        self.waited += [(event, device) for event in events]
        super().wait_for(events, device)


def ready_early(each: Connector, copies: Ahead, name: str = "a", **settings: Any) -> Any:
    """A ticket whose rows have still to be written."""
    before = len(copies.marks)
    ticket = each.submit(request(name, placeholders=prompt(9), **settings))
    assert wait(ticket) == "ready"
    assert len(copies.marks) == before + 1 and not copies.marks[-1].query()
    return ticket


def cleared(each: Connector, account: str) -> bool:
    each.clear_cache()
    return each.stats().bytes_used[account] == 0


@pytest.mark.parametrize("device_bytes", [0, 1 << 20])
def test_a_reader_waits_for_rows_that_are_ready_early(device_bytes: int) -> None:
    copies = Ahead()
    with connector(copies=copies, device_bytes=device_bytes, ready_ahead_s=None) as each:
        ticket = ready_early(each, copies)
        assert ticket.residence(0) is (Residence.DEVICE if device_bytes else Residence.HOST)
        assert (each.audit(), each.stats().early) == ([], 1)
        read: list[torch.Tensor] = []

        def reader() -> None:
            with each.read(ticket) as rows:
                read.append(rows[0].rows.clone())

        thread = threading.Thread(target=reader, daemon=True)
        thread.start()
        wait_until(lambda: len(copies.waited) == 1)
        assert not read
        expected = copies.marks[0] if device_bytes else copies.pending[0][0]
        assert copies.waited == [(expected, torch.device("cpu"))]
        copies.marks[0].come_to_pass()
        copies.arrive()
        wait_until(lambda: len(copies.marks) == 2)  # the reader's own
        copies.marks[1].come_to_pass()
        thread.join(PATIENCE_S)
        assert torch.equal(read[0], rows_of(image("a")))
        each.release(ticket)
        wait_until(lambda: cleared(each, "host"))
        wait_until(lambda: not each.stats().bytes_used["staging worker 0"])
        assert_nothing_is_left(each)


def test_rows_that_are_there_are_not_waited_for() -> None:
    copies = Ahead()
    with connector(copies=copies, ready_ahead_s=None) as each:
        ticket = ready_early(each, copies)
        copies.marks[0].come_to_pass()
        wait_until(lambda: not each.stats().bytes_used["staging worker 0"])
        copies.marks_wait = False
        with each.read(ticket):
            pass
        assert copies.waited == []


@pytest.mark.parametrize("device_bytes", [0, 1 << 20])
def test_memory_that_is_still_written_is_nobody_elses(device_bytes: int) -> None:
    """Released, or found again by another, before it is written."""
    copies = Ahead()
    with connector(copies=copies, device_bytes=device_bytes, ready_ahead_s=None) as each:
        gone = ready_early(each, copies)
        other = each.submit(request("a"))
        assert wait(other) == "ready" and len(copies.marks) == 1, "the same feature"
        each.release(gone), each.release(other)
        each.clear_cache()
        account = "device cpu" if device_bytes else "host"
        held = each.stats().bytes_used[account]
        assert held and each.audit() == [] and each.has_pending_work()
        copies.marks[0].come_to_pass()
        copies.arrive()
        wait_until(lambda: cleared(each, account))
        wait_until(lambda: not each.stats().bytes_used["staging worker 0"])
        assert_nothing_is_left(each)


@pytest.mark.parametrize(("holders", "keep"), [(0, True), (1, False), (1, True), (2, False)])
def test_a_device_that_is_lost_while_it_writes_fails_what_was_ready(holders: int, keep: bool) -> None:
    copies = Ahead()
    policy = FailurePolicy("text_only", retries=2)
    with connector(copies=copies, ready_ahead_s=None) as each:
        retention = "keep" if keep else "discard"
        tickets = [ready_early(each, copies, failure=policy, retention=retention)]
        if holders == 2:
            tickets.append(each.submit(request("a")))
            assert wait(tickets[1]) == "ready"
        each.step()
        if not holders:
            each.release(tickets.pop())
        copies.marks[0].fail(RuntimeError("an illegal memory access was encountered"))
        wait_until(lambda: each.stats().lost_workers == 1)
        assert set(each.step().unavailable) == set(tickets)
        for ticket in tickets:
            error = ticket.error
            assert error is not None and (error.kind, error.retryable) == ("worker_lost", True)
            with pytest.raises(InputError, match="failed"), each.read(ticket):
                pass
        assert each.audit() == []
        again = each.submit(request("a"))
        assert wait(again) == "ready", "encoded again, by another worker"
        assert len(copies.marks) == 2
        copies.marks[1].come_to_pass()
        copies.marks[0].come_to_pass()
        each.release(again)
        wait_until(lambda: not each.stats().bytes_used["staging worker 0"])
        wait_until(lambda: not each.stats().bytes_used["device cpu"])
        assert_nothing_is_left(each)


def test_a_reader_is_told_of_a_device_that_is_lost() -> None:
    """It may come before the worker's thread knows."""
    copies = Ahead()
    with connector(copies=copies, ready_ahead_s=None) as each:
        ticket = ready_early(each, copies)
        event = ManualEvent(passed=True)
        event.synchronize = _lost  # type: ignore[method-assign]
        ticket.items[0].entry.feature.written = (event,)
        with pytest.raises(ConnectorError, match="illegal memory access") as told, each.read(ticket):
            pass
        assert (told.value.kind, told.value.retryable) == ("worker_lost", True)
        for mark in copies.marks:
            mark.come_to_pass()


def _lost() -> None:
    raise RuntimeError("an illegal memory access was encountered")


def test_a_worker_that_is_given_up_takes_what_it_has_not_written_along() -> None:
    copies = Ahead()
    with connector(copies=copies, ready_ahead_s=None) as each:
        ticket = ready_early(each, copies)
        each.restart_worker("worker 0")
        assert ticket.state is State.FAILED
        assert each.stats().bytes_used["device cpu"], "its device may still write"
        assert each.audit() == []
        for mark in copies.marks:
            mark.come_to_pass()
        wait_until(lambda: not each.stats().bytes_used["device cpu"])
        wait_until(lambda: not each.stats().bytes_used["staging worker 0"])
        assert_nothing_is_left(each)


# --- when, by the books alone


def launched(bench: Bench, *names: str, fault: str | None = None) -> Batch:
    """A batch that the device has in hand; an image costs as much as it has tokens, and the last may fail."""
    books = bench.books
    machine = AnyHistory()
    machine.bench, machine.books = bench, books
    machine.digesting, machine.preparing, machine.encoding = [], [], []
    machine.launched, machine.events = [], []
    books.submit(EncodeRequest("r", [image(name) for name in names]), [MEDIA[name] for name in names], None)
    for _ in names:
        machine.take_cpu_job()
        machine.digested(0, False)
    books.settle()
    for _ in names:
        machine.take_cpu_job()
        machine.prepared(0, "ok")
    books.settle()
    machine.take_batch(0)
    (batch,) = machine.encoding
    machine.encoded(0, [None] * (len(names) - 1) + [fault], False)
    return batch


def pass_all(batch: Batch) -> None:
    for event in batch.events:
        event.passed = True  # type: ignore[attr-defined]


def step(bench: Bench) -> list[str]:
    """The media of tickets that have become ready."""
    told = [str(ticket.request.items[0].media) for ticket in bench.books.step().ready]
    assert audit(bench.books) == []
    return told


def bench_of(**settings: Any) -> Bench:
    return Bench.make(host_bytes=1 << 20, device_bytes=1 << 20, staging_bytes=1 << 20, **settings)


def test_a_step_sees_what_is_over_before_the_workers_thread_does() -> None:
    bench = bench_of()
    batch = launched(bench, "a")
    assert step(bench) == []
    pass_all(batch)
    assert step(bench) == ["a"]
    bench.books.encoding.publish(batch)  # and now the thread
    assert (step(bench), bench.workers[0].num_batches, bench.books.parts.stats.early) == ([], 0, 0)


def test_nothing_is_ready_early_unless_asked_for() -> None:
    bench = bench_of()
    for name in "ab":
        batch = launched(bench, name)
        bench.clock.now += 1.0
        assert step(bench) == []
        pass_all(batch)
        assert step(bench) == [name]


def test_an_end_is_predicted_by_what_was_measured() -> None:
    """Four tokens took four seconds, so the first 8 and then 16 take 8 and 16 of them."""
    bench = bench_of(ready_ahead_s=2.0, max_batches_in_flight=2)
    first = launched(bench, "a")
    bench.clock.now = 3.9
    assert step(bench) == [], "nothing is known yet"
    bench.clock.now = 4.0
    pass_all(first)
    assert step(bench) == ["a"]
    bench.clock.now = 10.0
    second, third = launched(bench, "c"), launched(bench, "d")
    bench.clock.now = 15.9
    assert step(bench) == []
    bench.clock.now = 16.0
    assert step(bench) == ["c"]
    assert (second.is_announced, third.is_announced) == (True, False)
    bench.clock.now = 19.0  # later than predicted: so is the next
    pass_all(second)
    assert step(bench) == []
    bench.clock.now = 32.9
    assert step(bench) == []
    bench.clock.now = 33.0  # 16 times the median of 1 and 9 / 8, after 19
    assert step(bench) == []
    bench.clock.now = 34.0
    assert step(bench) == ["d"]
    pass_all(third)
    bench.books.encoding.publish(third)
    assert (step(bench), bench.books.parts.stats.early) == ([], 2)


def test_what_failed_while_it_was_launched_is_not_ready_and_its_batch_is() -> None:
    bench = bench_of(ready_ahead_s=None)
    batch = launched(bench, "a", "b", fault="encoder")
    (ready,), (failed,) = batch.announced, batch.entries
    assert (ready.state, failed.state) == (State.READY, State.ENCODING)
    assert ready.feature is not None and isinstance(ready.feature.rows, Rows)
    assert ready.feature.is_being_written and not ready.feature.is_idle
    pass_all(batch)
    assert step(bench) == []
    assert failed.state is State.FAILED
    assert bench.books.parts.stats.failures == {"encoder": 1}


def test_what_is_still_written_does_not_move_to_the_host_yet() -> None:
    bench = bench_of(ready_ahead_s=None)
    batch = launched(bench, "a")
    (ticket,) = bench.books.parts.tickets.values()
    bench.books.release(ticket, keep=True)
    bench.books.settle()
    assert bench.books.demotions.take() is None and audit(bench.books) == []
    pass_all(batch)
    assert step(bench) == []
    move = bench.books.demotions.take()
    assert move is not None and move.entry is batch.announced[0]
