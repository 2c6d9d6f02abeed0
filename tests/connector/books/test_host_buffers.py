from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.books.storage import HOST, HostBuffers, Ledger, capacity_of
from fxsplit_encoder.connector.statistics import ConnectorStats

PAGE = 4096


@pytest.fixture
def buffers() -> HostBuffers:
    ledger = Ledger()
    ledger.open(HOST, 8 * PAGE)
    return HostBuffers(ledger, ConnectorStats())


@given(st.integers(1, 1 << 40))
def test_a_buffer_is_a_power_of_two_and_no_more_than_twice_as_large(num_bytes: int) -> None:
    capacity = capacity_of(num_bytes)
    assert capacity.bit_count() == 1
    assert num_bytes <= capacity
    assert capacity == PAGE or capacity < 2 * num_bytes


def test_memory_is_reserved_before_there_is_a_buffer(buffers: HostBuffers) -> None:
    assert buffers.reserve("a", 5000)
    assert buffers.available() == 6 * PAGE
    assert buffers.buffer("a") is None
    buffers.attach("a", "the buffer")
    assert buffers.buffer("a") == "the buffer"
    assert not buffers.reserve("b", 7 * PAGE)
    assert buffers.problems() == []


def test_the_buffer_of_what_is_gone_serves_again(buffers: HostBuffers) -> None:
    buffers.reserve("a", 5000)
    buffers.attach("a", "the buffer")
    buffers.move("a", "heir")
    assert buffers.buffer("a") is None
    buffers.release("heir")
    assert (buffers.idle_bytes, buffers.available()) == (2 * PAGE, 8 * PAGE)
    assert buffers.reserve("b", 8000)
    assert buffers.buffer("b") == "the buffer"
    assert buffers.idle_bytes == 0
    assert buffers.problems() == []


def test_an_idle_buffer_makes_way_for_another_size(buffers: HostBuffers) -> None:
    for owner in "ab":
        buffers.reserve(owner, 2 * PAGE)
    buffers.attach("a", "the buffer")
    buffers.release("a")
    assert buffers.reserve("c", 4 * PAGE)
    assert buffers.was_dropped is False, "there was room enough"
    assert buffers.reserve("d", PAGE)
    assert (buffers.was_dropped, buffers.idle_bytes) == (True, 0)
    assert buffers.problems() == []


def test_bytes_without_a_buffer_are_simply_given_back(buffers: HostBuffers) -> None:
    buffers.reserve("a", PAGE)
    buffers.release("a")
    assert (buffers.idle_bytes, buffers.available(), buffers.owners) == (0, 8 * PAGE, [])


def test_books_that_were_tampered_with_do_not_add_up(buffers: HostBuffers) -> None:
    buffers.reserve("a", PAGE)
    buffers._idle[PAGE] = ["x"]
    buffers._buffers["nobody"] = "y"
    assert buffers.problems() == ["4096 bytes of idle buffers, 0 charged", "nobody has a buffer and no bytes"]
