"""Who holds which block of a memory, for several threads at once."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from fxsplit_encoder.connector.transport.blocks import BlockList
from fxsplit_encoder.errors import InputError, TransportError, TransportFullError


class Block(NamedTuple):
    """A part of a memory that is held, in bytes."""

    number: int
    offset: int
    num_bytes: int


class HeldBlocks:
    """The blocks of one memory.

    Args:
        num_bytes: of the memory.
        clear: called with a block before it is free again.
    """

    def __init__(self, num_bytes: int, clear: Callable[[Block], None]) -> None:
        self.num_bytes = num_bytes
        self._clear = clear
        self._free = BlockList(num_bytes)
        self._held: dict[int, Block] = {}
        self._last = 0
        self._is_open = True
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks that are held or being cleared."""
        return self.num_bytes - self._free.free_bytes

    @property
    def num_held(self) -> int:
        """Blocks that are held."""
        return len(self._held)

    def take(self, num_bytes: int, timeout: float = 0.0) -> Block:
        """A block of exactly so many bytes.

        Args:
            num_bytes: more than 0.
            timeout: seconds to wait for others to give theirs back.

        Raises:
            InputError: the memory is not that large.
            TransportFullError: there was no room in time.
            TransportError: they are closed.
        """
        if num_bytes > self.num_bytes:
            raise InputError(f"buffers: expected at most max_bytes={self.num_bytes}; got {num_bytes} bytes")
        deadline = time.monotonic() + timeout
        with self._changed:
            turn = object()
            self._waiting.append(turn)
            try:
                while (block := self._take_next(turn, num_bytes)) is None:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        self._fail_for_room(num_bytes)
                return block
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _take_next(self, turn: object, num_bytes: int) -> Block | None:
        """A block, for whoever has waited longest: else small ones would keep a large one out forever."""
        self._check_open()
        offset = self._free.take(num_bytes) if self._waiting[0] is turn else None
        if offset is None:
            return None
        self._last += 1
        return self._held.setdefault(self._last, Block(self._last, offset, num_bytes))

    def _check_open(self) -> None:
        if not self._is_open:
            raise TransportError("the transport is closed")

    def _fail_for_room(self, num_bytes: int) -> None:
        self._check_open()
        raise TransportFullError(
            f"{num_bytes} bytes do not fit beside {self.held_bytes} of max_bytes={self.num_bytes} "
            f"that {len(self._held)} handles hold"
        )

    def find(self, number: int) -> Block | None:
        """A block that is held."""
        return self._held.get(number)

    def give_back(self, number: int) -> None:
        """Free a block; one that nobody holds is left alone."""
        with self._changed:
            block = self._held.pop(number, None)
        if block is None:
            return
        try:
            self._clear(block)
        finally:  # what cannot be cleared belongs to a device that is lost, and is used by nobody
            with self._changed:
                self._free.give_back(block.offset, block.num_bytes)
                self._changed.notify_all()

    def close(self) -> None:
        """Hold nothing any more, clear nothing, and wake whoever waits for room; idempotent."""
        with self._changed:
            self._is_open = False
            for block in self._held.values():
                self._free.give_back(block.offset, block.num_bytes)
            self._held.clear()
            self._changed.notify_all()

    def audit(self) -> None:
        """Asserts that blocks and free ranges make up the memory, without overlap."""
        with self._changed:
            blocks = sorted(self._held.values(), key=lambda block: block.offset)
            held = sum(block.num_bytes for block in blocks)
            assert held <= self.held_bytes, "less is taken than what is held"
            for before, after in itertools.pairwise(blocks):
                assert before.offset + before.num_bytes <= after.offset, f"{before} overlaps {after}"
