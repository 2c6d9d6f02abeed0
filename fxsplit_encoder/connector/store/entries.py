"""Which features a store has, and who holds them: plain books, of one thread at a time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from fxsplit_encoder.connector.transport.seam import Handle


@dataclass
class Entry:
    """One feature."""

    key: bytes
    handle: Handle
    num_bytes: int
    holders: Counter[Hashable] = field(default_factory=Counter)


class Entries:
    """Features by key, the one used longest ago first.

    A feature may be held several times by each of several holders. What nobody holds may be given up.
    """

    def __init__(self) -> None:
        self._by_key: OrderedDict[bytes, Entry] = OrderedDict()
        self._by_number: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    @property
    def num_held(self) -> int:
        """Features that somebody holds."""
        return sum(bool(entry.holders) for entry in self._by_key.values())

    @property
    def free_bytes(self) -> int:
        """Bytes of those that nobody holds."""
        return sum(entry.num_bytes for entry in self._by_key.values() if not entry.holders)

    def add(self, key: bytes, handle: Handle, num_bytes: int) -> None:
        """A new feature, that nobody holds yet."""
        assert key not in self._by_key, "added twice"
        entry = Entry(key, handle, num_bytes)
        self._by_key[key] = self._by_number[handle.number] = entry

    def touch(self, key: bytes) -> None:
        """Let a feature be given up last."""
        self._by_key.move_to_end(key)

    def hold(self, key: bytes, holder: Hashable) -> Handle | None:
        """The handle of a feature, held once more; None: there is none."""
        entry = self._by_key.get(key)
        if entry is None:
            return None
        entry.holders[holder] += 1
        self.touch(key)
        return entry.handle

    def release(self, number: int, holder: Hashable) -> None:
        """One hold less; what a holder does not hold is left alone."""
        entry = self._by_number.get(number)
        if entry is not None and entry.holders[holder] > 0:
            entry.holders[holder] -= 1
        if entry is not None:
            entry.holders += Counter()  # without those at 0

    def drop_holder(self, holder: Hashable) -> None:
        """Release all that a holder has."""
        for entry in self._by_key.values():
            entry.holders.pop(holder, None)

    def give_up(self) -> Handle | None:
        """Take out the feature that was used longest ago of those that nobody holds; None: all are held."""
        found = next((entry for entry in self._by_key.values() if not entry.holders), None)
        return None if found is None else self.remove(found.key)

    def remove(self, key: bytes) -> Handle:
        """Take out a feature."""
        entry = self._by_key.pop(key)
        del self._by_number[entry.handle.number]
        return entry.handle
