"""Which parts of a memory are taken: integers only, first fit, neighbors joined when they become free."""

from __future__ import annotations

import bisect


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
