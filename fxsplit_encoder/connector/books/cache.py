"""Features by what they were made from, and which of them may make way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from fxsplit_encoder.connector.books.entry import Entry
from fxsplit_encoder.connector.states import State


class FeatureCache:
    """Entries by key, from the moment that one is being made: whoever wants the same joins.

    An entry is whole once it is READY; before that nobody reads it. What nobody holds rests, and makes way
    for others, least recently used first.
    """

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        """Every feature that is being made or kept, also those that are nobody else's."""
        self._by_key: dict[bytes, Entry] = {}
        self._resting: OrderedDict[Entry, None] = OrderedDict()

    def resting(self) -> Iterator[Entry]:
        """Those that nobody holds, least recently used first."""
        return iter(self._resting)

    def find(self, key: bytes) -> Entry | None:
        """The entry of a key, READY or being made."""
        return self._by_key.get(key)

    def add(self, entry: Entry) -> None:
        """From now on others may join; an entry without a key is nobody else's."""
        self.entries[entry] = None
        if entry.key is not None:
            assert entry.key not in self._by_key
            self._by_key[entry.key] = entry

    def remove(self, entry: Entry) -> None:
        """Nobody finds it any more."""
        del self.entries[entry]
        self.wake(entry)
        if entry.key is not None:
            del self._by_key[entry.key]

    def rest(self, entry: Entry) -> None:
        """Nobody holds a READY entry any more, and it was used last."""
        assert entry.state is State.READY and not entry.holders
        self._resting[entry] = None
        self._resting.move_to_end(entry)

    def wake(self, entry: Entry) -> None:
        """Somebody holds it again."""
        self._resting.pop(entry, None)

    def problems(self) -> list[str]:
        """What does not add up; empty: nothing."""
        wrong = []
        for entry in self._resting:
            if entry.holders or entry.state is not State.READY:
                wrong.append(f"{entry} rests, with {len(entry.holders)} holders")
        for entry in self.entries:
            if entry.key is not None and self._by_key.get(entry.key) is not entry:
                wrong.append(f"{entry} is not found under its key")
            if entry.state is State.READY and not entry.holders and entry not in self._resting:
                wrong.append(f"{entry} is held by nobody and does not rest")
            if entry.state in (State.RELEASED, State.FAILED, State.CANCELLED):
                wrong.append(f"{entry} is known, and gone")
        for entry in (*self._resting, *self._by_key.values()):
            if entry not in self.entries:
                wrong.append(f"{entry} is found, and not known")
        return wrong
