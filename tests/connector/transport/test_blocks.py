from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.transport.blocks import Block, BlockList, HeldBlocks
from fxsplit_encoder.errors import TransportError, TransportFullError
from tests.connector.resources import eventually


def test_the_lowest_range_that_is_large_enough_is_taken() -> None:
    blocks = BlockList(100)
    assert [blocks.take(size) for size in (30, 20, 40)] == [0, 30, 50]
    assert blocks.take(20) is None
    blocks.give_back(0, 30)
    blocks.give_back(50, 40)
    assert (blocks.take(31), blocks.take(10), blocks.free_bytes) == (50, 0, 39)


def test_what_is_free_is_not_freed_again() -> None:
    blocks = BlockList(100)
    assert blocks.take(50) == 0
    blocks.give_back(0, 50)
    with pytest.raises(AssertionError):
        blocks.give_back(0, 50)
    with pytest.raises(AssertionError):
        BlockList(100).give_back(20, 10)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 100)), max_size=60))
def test_no_byte_is_given_twice_and_all_come_back(steps: list[tuple[bool, int, int]]) -> None:
    blocks, held = BlockList(100), {}
    for takes, size, which in steps:
        if takes and (offset := blocks.take(size)) is not None:
            taken = {byte for start, length in held.items() for byte in range(start, start + length)}
            assert taken.isdisjoint(range(offset, offset + size))
            assert offset + size <= 100
            held[offset] = size
        elif not takes and held:
            offset = list(held)[which % len(held)]
            blocks.give_back(offset, held.pop(offset))
        assert blocks.free_bytes == 100 - sum(held.values())
    for offset, size in held.items():
        blocks.give_back(offset, size)
    assert blocks.take(100) == 0


def test_blocks_are_cleared_before_they_are_free_again() -> None:
    cleared: list[Block] = []
    held = HeldBlocks(128, cleared.append)
    block = held.take(128)
    with pytest.raises(TransportFullError, match="64 bytes do not fit beside 128"):
        held.take(64)
    held.give_back(block.number)
    held.give_back(block.number)
    assert (cleared, held.held_bytes, held.num_held) == ([block], 0, 0)
    assert held.take(64).number > block.number


def test_closing_wakes_whoever_waits() -> None:
    held = HeldBlocks(64, lambda block: None)
    held.take(64)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            held.take(64, timeout=60)
        except TransportError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.01)
    held.close()
    waiting.join()
    assert [str(error) for error in errors] == ["the transport is closed"]
    assert held.held_bytes == 0
    held.close()


def test_small_ones_do_not_keep_a_large_one_out() -> None:
    held = HeldBlocks(128, lambda block: None)
    first, second = held.take(64), held.take(64)
    order: list[str] = []

    def take(name: str, num_bytes: int) -> None:
        block = held.take(num_bytes, timeout=60)
        order.append(name)
        held.give_back(block.number)

    threads = []
    for name, num_bytes in (("large", 128), ("small", 64)):
        threads.append(threading.Thread(target=take, args=(name, num_bytes)))
        threads[-1].start()
        assert eventually(lambda: len(held._waiting) == len(threads))
    held.give_back(first.number)
    with pytest.raises(TransportFullError):  # there is room, but not for whoever comes last
        held.take(64)
    held.give_back(second.number)
    for thread in threads:
        thread.join()
    assert order == ["large", "small"]
