"""Host memory for features: reserved before work, and the buffers of what is gone used again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from fxsplit_encoder.connector.books.ledger import Ledger
from fxsplit_encoder.connector.statistics import ConnectorStats

HOST = "host"
"""The ledger's account of host buffers."""

_SMALLEST = 1 << 12


def capacity_of(num_bytes: int) -> int:
    """Bytes of the buffer for so many: a power of two, as the allocator of pinned memory makes them, so that
    the ledger counts what is really taken.
    """
    return max(_SMALLEST, 1 << (num_bytes - 1).bit_length())


class HostBuffers:
    """Reserves host memory, at first as a number of bytes, which an owner turns into a buffer when needed.

    Buffers of features that are gone stay at hand, charged to this object, until another size needs their
    bytes.

    Args:
        ledger: with an account `HOST`.
        stats: where buffers that serve again are counted.
    """

    def __init__(self, ledger: Ledger, stats: ConnectorStats) -> None:
        self._ledger = ledger
        self._stats = stats
        self._idle: dict[int, list[Any]] = {}
        self._buffers: dict[Hashable, Any] = {}
        self.was_dropped = False
        """Whether buffers were let go since the allocator was last told to give memory back."""

    @property
    def idle_bytes(self) -> int:
        """Bytes of buffers that nobody has."""
        return sum(capacity * len(buffers) for capacity, buffers in self._idle.items())

    @property
    def owners(self) -> list[Hashable]:
        """Those that have a buffer."""
        return list(self._buffers)

    def available(self) -> int:
        """Bytes that can be reserved now."""
        return self._ledger.free(HOST) + self.idle_bytes

    def reserve(self, owner: Hashable, num_bytes: int) -> bool:
        """Give an owner memory for so many bytes; False, and nothing changes, where there is not enough."""
        capacity = capacity_of(num_bytes)
        if buffers := self._idle.get(capacity):
            self._buffers[owner] = buffers.pop()
            self._ledger.move(HOST, self, owner, capacity)
            self._stats.reused_buffers += 1
            return True
        if capacity > self.available():
            return False
        self._drop(capacity - self._ledger.free(HOST))
        return self._ledger.reserve(HOST, owner, capacity)

    def buffer(self, owner: Hashable) -> Any | None:
        """The owner's buffer; None: it has to allocate and `attach` one of the bytes that it has."""
        return self._buffers.get(owner)

    def attach(self, owner: Hashable, buffer: Any) -> None:
        """The owner's bytes are this buffer from now on."""
        assert owner not in self._buffers
        self._buffers[owner] = buffer

    def move(self, owner: Hashable, heir: Hashable) -> None:
        """Another owner takes over."""
        self._ledger.move(HOST, owner, heir)
        if owner in self._buffers:
            self._buffers[heir] = self._buffers.pop(owner)

    def release(self, owner: Hashable) -> None:
        """The owner needs it no more; nothing may still read or write its buffer."""
        if (buffer := self._buffers.pop(owner, None)) is None:
            self._ledger.release(HOST, owner)
        else:
            capacity = self._ledger.owned(HOST, owner)
            self._idle.setdefault(capacity, []).append(buffer)
            self._ledger.move(HOST, owner, self)

    def drop_idle(self) -> None:
        """Let go of all buffers that nobody has."""
        self._drop(self.idle_bytes)

    def _drop(self, num_bytes: int) -> None:
        """Let go of idle buffers of so many bytes together, the largest first."""
        for capacity in sorted(self._idle, reverse=True):
            while num_bytes > 0 and self._idle[capacity]:
                self._idle[capacity].pop()
                self._ledger.release(HOST, self, capacity)
                self.was_dropped = True
                num_bytes -= capacity

    def problems(self) -> list[str]:
        """What does not add up; empty: nothing."""
        wrong = []
        if self._ledger.owned(HOST, self) != self.idle_bytes:
            wrong.append(f"{self.idle_bytes} bytes of idle buffers, {self._ledger.owned(HOST, self)} charged")
        for owner in self._buffers:
            if not self._ledger.owned(HOST, owner):
                wrong.append(f"{owner} has a buffer and no bytes")
        return wrong
