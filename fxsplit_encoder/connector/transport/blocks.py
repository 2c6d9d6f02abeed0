"""Which parts of a memory are taken: integers only, first fit, neighbors joined when they become free."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from fxsplit_encoder.errors import InputError, TransportError, TransportFullError


class BlockList:
    """The free ranges of a memory.

    Args:
        num_bytes: its size. What is taken is what was asked for: whoever asks rounds up.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._starts = [0] if num_bytes else []
        self._sizes = [num_bytes] if num_bytes else []

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has, in however many ranges."""
        return sum(self._sizes)

    def take(self, num_bytes: int) -> int | None:
        """The offset of the lowest free range that is large enough; None: there is none."""
        assert num_bytes > 0
        for index, size in enumerate(self._sizes):
            if size >= num_bytes:
                offset = self._starts[index]
                self._shrink(index, num_bytes)
                return offset
        return None

    def _shrink(self, index: int, num_bytes: int) -> None:
        if self._sizes[index] == num_bytes:
            del self._starts[index], self._sizes[index]
            return
        self._starts[index] += num_bytes
        self._sizes[index] -= num_bytes

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Make a range free that `take` gave."""
        index = bisect.bisect(self._starts, offset)
        assert index == 0 or self._starts[index - 1] + self._sizes[index - 1] <= offset, "freed twice"
        assert index == len(self._starts) or offset + num_bytes <= self._starts[index], "freed twice"
        self._starts.insert(index, offset)
        self._sizes.insert(index, num_bytes)
        self._join(index)
        self._join(index - 1)

    def _join(self, index: int) -> None:
        """Join a range with its successor, if they touch."""
        if 0 <= index < len(self._starts) - 1:
            if self._starts[index] + self._sizes[index] == self._starts[index + 1]:
                self._sizes[index] += self._sizes.pop(index + 1)
                del self._starts[index + 1]


class Block(NamedTuple):
    """A part of a memory that is held, in bytes."""

    number: int
    offset: int
    num_bytes: int


class HeldBlocks:
    """The blocks of one memory."""

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
