"""A fault of one end, or of a thread at it, is an end that is gone: nobody waits for what cannot come."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from fxsplit_encoder.connector.transport.blocks import Block, HeldBlocks
from fxsplit_encoder.connector.transport.wire import (
    Codec,
    Greeting,
    Packet,
    Peer,
    Released,
    connected_sockets,
)
from tests.connector.resources import nothing_left

CODEC: Codec[Packet] = Codec(Packet)


def test_a_listener_that_fails_tells_that_the_other_end_is_gone() -> None:
    """Such as by an event of a device that is lost: blocks are given back no more, and nobody may wait."""
    gone = threading.Event()

    def fail(owner: str, numbers: Sequence[int]) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with nothing_left():
        ours, theirs = connected_sockets()
        peer = Peer(ours, fail, gone.set)
        theirs.send(CODEC.encode(Greeting("other", 4096)))
        peer.greet(Greeting("own", 4096), [], timeout=60)
        theirs.send(CODEC.encode(Released("own", [1])))
        assert gone.wait(60)
        peer.close()
        theirs.close()


def test_a_block_that_cannot_be_cleared_is_free_all_the_same() -> None:
    def fail(block: Block) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    blocks = HeldBlocks(64, fail)
    block = blocks.take(64)
    with pytest.raises(RuntimeError, match="illegal"):
        blocks.give_back(block.number)
    assert blocks.held_bytes == 0
    blocks.audit()
