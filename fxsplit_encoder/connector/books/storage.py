"""Where features are: the cache by key, memory on the host and on devices, and eviction."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fxsplit_encoder.connector.books.tickets import Account, Entry, Feature, Memory, capacity_of
from fxsplit_encoder.connector.request import ConnectorConfig
from fxsplit_encoder.connector.states import Residence, State
from fxsplit_encoder.connector.statistics import ConnectorStats


class Storage:
    """Entries by key, and the memory of their rows.

    Entries without holders rest, and are evicted least recently used first. Memory that a device may still
    read or write is in quarantine until its events have passed.
    """

    def __init__(self, config: ConnectorConfig, stats: ConnectorStats) -> None:
        self.host = Account("host", config.host_bytes)
        self.inputs = Account("inputs", None)
        """Preprocessed items; `Preparation` bounds them."""
        self.accounts = {account.name: account for account in (self.host, self.inputs)}
        self.entries: dict[Entry, None] = {}
        """Every feature that is being made or kept, also those that are nobody else's."""
        self.by_key: dict[bytes, Entry] = {}
        """Those that are shared, from the moment that one is being made."""
        self.resting: dict[Entry, None] = {}
        """Entries without holders, least recently used first."""
        self.quarantine: dict[Feature, None] = {}
        """Features that are gone, but that a device may still read or write."""
        self.was_freed = False
        """Whether a ticket that waits for memory may have come to its turn."""
        self.idle_bytes = 0
        """Of host buffers that were let go since the allocator was last told to give memory back."""
        self._device_bytes = config.device_bytes
        self._stats = stats

    def open(self, name: str, limit: int) -> Account:
        """The account of a name, made with this limit if there is none."""
        return self.accounts.setdefault(name, Account(name, limit))

    # --- the cache

    def add(self, entry: Entry) -> None:
        """From now on others may join; an entry without a key is not shared."""
        self.entries[entry] = None
        if entry.key is not None:
            assert entry.key not in self.by_key
            self.by_key[entry.key] = entry

    def remove(self, entry: Entry) -> None:
        """Take an entry out of the cache, and free what it has."""
        del self.entries[entry]
        self.resting.pop(entry, None)
        if entry.key is not None:
            del self.by_key[entry.key]
        entry.drop_inputs()
        if entry.memory is not None:
            entry.memory.free()
            entry.memory = None
        if entry.feature is not None:
            feature, entry.feature = entry.feature, None
            self.free(feature)
        self.was_freed = True

    def rest(self, entry: Entry) -> None:
        """Nobody holds a READY entry any more, and it was used last."""
        assert entry.state is State.READY and not entry.holders and entry not in self.resting
        self.resting[entry] = None
        self.was_freed = True

    # --- memory

    def reserve(self, sizes: Sequence[int], spared: Collection[Entry] = ()) -> list[Memory] | None:
        """Host memory for rows of so many bytes each, or None, and then nothing is evicted."""
        self.settle()
        capacities = [capacity_of(size) for size in sizes]
        if not self._make_room(self.host, sum(capacities), spared):
            return None
        return [self.host.take(capacity) for capacity in capacities]

    def claim_device(self, device: str, num_bytes: int) -> Memory | None:
        """Room for rows where their encoder left them; None if there is none."""
        account = self.open(f"device {device}", self._device_bytes)
        self.settle()
        return account.take(num_bytes) if self._make_room(account, num_bytes) else None

    def _make_room(self, account: Account, num_bytes: int, spared: Collection[Entry] = ()) -> bool:
        """Evict so that so many bytes are free, or evict nothing if they cannot be."""
        missing = num_bytes - account.free
        if missing <= 0:
            return True
        chosen = []
        for entry in self.resting:
            feature = entry.feature
            assert feature is not None and feature.memory is not None
            if missing > 0 and feature.memory.account is account and entry not in spared and feature.is_idle:
                chosen.append(entry)
                missing -= feature.memory.num_bytes
        if missing > 0:
            return False
        for entry in chosen:
            assert entry.feature is not None and entry.feature.memory is not None
            self._stats.evictions += 1
            self._stats.evicted_bytes += entry.feature.memory.num_bytes
            entry.move(State.RELEASED)
            self.remove(entry)
        return True

    def free(self, feature: Feature) -> None:
        """Free rows that are not found any more, now or once no device uses them."""
        self.quarantine[feature] = None
        self.settle()

    def settle(self) -> None:
        """Free what is in quarantine and not in use any more."""
        for feature in [feature for feature in self.quarantine if feature.is_idle]:
            del self.quarantine[feature]
            self.was_freed = True
            feature.rows = None
            if feature.memory is not None:
                feature.memory.free()
                self.idle_bytes += feature.memory.num_bytes if feature.residence is Residence.HOST else 0
