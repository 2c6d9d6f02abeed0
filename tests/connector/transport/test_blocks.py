from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.transport.blocks import BlockList


def test_the_lowest_range_that_is_large_enough_is_taken() -> None:
    blocks = BlockList(100)
    assert [blocks.take(size) for size in (30, 20, 40)] == [0, 30, 50]
    assert blocks.take(20) is None
    blocks.give_back(0, 30)
    blocks.give_back(50, 40)
    assert (blocks.take(31), blocks.take(10), blocks.free_bytes) == (50, 0, 39)


def test_neighbors_become_one_range_in_any_order() -> None:
    blocks = BlockList(90)
    offsets = [blocks.take(30) for _ in range(3)]
    for offset in (offsets[2], offsets[0], offsets[1]):
        assert offset is not None
        blocks.give_back(offset, 30)
    assert blocks.take(90) == 0


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
