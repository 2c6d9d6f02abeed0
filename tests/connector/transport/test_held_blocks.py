from __future__ import annotations

import random
import threading
import time

import pytest

from fxsplit_encoder.connector.transport.blocks import Block, HeldBlocks
from fxsplit_encoder.errors import InputError, TransportError, TransportFullError
from tests.connector.resources import eventually


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


def test_what_never_fits_is_an_error_of_the_caller() -> None:
    with pytest.raises(InputError, match="at most max_bytes=128; got 192"):
        HeldBlocks(128, lambda block: None).take(192, timeout=60)


def test_whoever_waits_gets_what_another_gives_back() -> None:
    held = HeldBlocks(128, lambda block: None)
    first = held.take(128)
    got: list[Block] = []
    waiting = threading.Thread(target=lambda: got.append(held.take(64, timeout=60)))
    waiting.start()
    time.sleep(0.01)
    assert not got
    held.give_back(first.number)
    waiting.join()
    assert (got[0].num_bytes, held.held_bytes) == (64, 64)


def test_a_wait_has_an_end() -> None:
    held = HeldBlocks(64, lambda block: None)
    held.take(64)
    with pytest.raises(TransportFullError):
        held.take(64, timeout=0.01)


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


def test_eight_threads_take_and_give_back() -> None:
    held = HeldBlocks(1 << 12, lambda block: None)

    def work(seed: int) -> None:
        source, mine = random.Random(seed), []
        for _ in range(500):
            if mine and source.random() < 0.5:
                held.give_back(mine.pop(source.randrange(len(mine))).number)
            else:
                try:
                    mine.append(held.take(64 * source.randint(1, 8)))
                except TransportFullError:
                    pass
            held.audit()
        for block in mine:
            held.give_back(block.number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (held.held_bytes, held.num_held) == (0, 0)
    assert held.take(1 << 12).offset == 0


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
