"""Bytes that are reserved, rows that lie in them, and the devices that may still use those."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from fxsplit_encoder.connector.states import Residence


class Memory:
    """Bytes of an account, which whoever has this object holds until it is freed."""

    def __init__(self, account: Account, num_bytes: int) -> None:
        self.account = account
        self.num_bytes = num_bytes
        self.is_freed = False

    def free(self) -> None:
        """Give the bytes back; called once."""
        assert not self.is_freed, f"{self.num_bytes} bytes of {self.account.name} are freed twice"
        self.is_freed = True
        self.account.used -= self.num_bytes


class Account:
    """Bytes that may be reserved, None: any number. Not locked: callers hold the connector's lock."""

    def __init__(self, name: str, limit: int | None) -> None:
        self.name = name
        self.limit = limit
        self.used = self.peak = 0

    @property
    def free(self) -> int:
        """Bytes that may still be reserved; without a limit a very large number."""
        return 2**63 if self.limit is None else self.limit - self.used

    def take(self, num_bytes: int) -> Memory:
        """Reserve so many bytes, which are free."""
        assert num_bytes <= self.free, f"{self.name}: {num_bytes} bytes of {self.free}"
        self.used += num_bytes
        self.peak = max(self.peak, self.used)
        return Memory(self, num_bytes)


_SMALLEST = 1 << 12


def capacity_of(num_bytes: int) -> int:
    """Bytes of the buffer for so many: a power of two, as the allocator of pinned memory makes them, so that
    accounts count what is really taken.
    """
    return max(_SMALLEST, 1 << (num_bytes - 1).bit_length())


class Event(Protocol):
    """A point of a device's stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed it, or is lost: nothing uses memory on its account any more."""
        ...

    def has_succeeded(self) -> bool:
        """Whether the device has passed it, and not because it was lost."""
        ...

    def synchronize(self) -> None:
        """Blocks until the device has passed it; raises RuntimeError where the device was lost."""
        ...


class _PassedEvent:
    def query(self) -> bool:
        return True

    def has_succeeded(self) -> bool:
        return True

    def synchronize(self) -> None: ...


PASSED: Event = _PassedEvent()
"""Of work which the calling thread has done itself."""


@dataclass(eq=False)
class Feature:
    """The rows of an item where they lie, and who is reading them."""

    rows: Any
    """A tensor (tokens, width)."""
    residence: Residence
    memory: Memory | None
    """That of the rows; None: of rows on their way to the host, their entry has it."""
    num_reads: int = 0
    """Reads that are being issued."""
    read_events: list[Event] = field(default_factory=list)
    """When those that have been issued are over."""

    @property
    def is_idle(self) -> bool:
        """Whether no read of the rows is issued or running, so that their memory can be reused."""
        self.read_events = [event for event in self.read_events if not event.query()]
        return not self.num_reads and not self.read_events
