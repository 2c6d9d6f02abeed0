"""The ledger, and batches that end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.books.audit import audit
from fxsplit_encoder.connector.books.encoding import Batch
from fxsplit_encoder.connector.books.storage import Ledger, capacity_of
from fxsplit_encoder.connector.interfaces import MediaItem
from fxsplit_encoder.connector.request import EncodeRequest

from .test_any_history import MEDIA, AnyHistory, Bench


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.open("host", 100)
    return ledger


def test_nobody_gives_back_what_he_has_not(ledger: Ledger) -> None:
    ledger.reserve("host", "a", 10)
    with pytest.raises(AssertionError, match="has 10 bytes, not 11"):
        ledger.release("host", "a", 11)


def test_an_account_without_a_limit_takes_all(ledger: Ledger) -> None:
    ledger.open("inputs", None)
    assert ledger.reserve("inputs", "a", 1 << 50)
    ledger.open("inputs", 1)  # it is open already
    assert ledger.limit("inputs") is None
    assert ledger.accounts() == ["host", "inputs"]


def test_books_that_were_tampered_with_do_not_add_up(ledger: Ledger) -> None:
    ledger.reserve("host", "a", 10)
    ledger._owned["host"]["b"] = 5
    assert ledger.problems() == ["host: owners have 15, used are 10"]
    ledger._owned["host"]["b"] = 0
    assert ledger.problems() == ["host: an owner has no bytes"]
    ledger.peaks["host"] = 101
    assert "host: 101 of 100 bytes were reserved" in ledger.problems()


PAGE = 4096


@given(st.integers(1, 1 << 40))
def test_a_buffer_is_a_power_of_two_and_no_more_than_twice_as_large(num_bytes: int) -> None:
    capacity = capacity_of(num_bytes)
    assert capacity.bit_count() == 1
    assert num_bytes <= capacity
    assert capacity == PAGE or capacity < 2 * num_bytes


def launched(bench: Bench, name: str) -> Batch:
    """A batch of one image that is on the device."""
    machine = AnyHistory.of(bench)
    bench.submit(EncodeRequest("r", [MediaItem("image", name)]), [MEDIA[name]])
    machine.work("prepared")
    machine.take_batch(0)
    (batch,) = machine.encoding
    machine.encoded(0, [None], False)
    return batch


def ready(bench: Bench) -> list[str]:
    """The media of tickets that a step reports as ready."""
    step = bench.books.step()
    assert audit(bench.books) == []
    return [str(ticket.request.items[0].media) for ticket in step.ready]


def test_a_step_sees_a_finished_batch_before_its_thread_does() -> None:
    bench = Bench.make(host_bytes=1 << 20, device_bytes=1 << 20, staging_bytes=1 << 20)
    for name in "ab":
        batch = launched(bench, name)
        bench.clock.now += 1.0
        assert ready(bench) == []
        for event in batch.events:
            event.passed = True  # type: ignore[attr-defined]
        assert ready(bench) == [name]
        bench.books.encoding.publish(batch)  # as the thread does later
        assert (ready(bench), bench.workers[0].num_batches) == ([], 0)
