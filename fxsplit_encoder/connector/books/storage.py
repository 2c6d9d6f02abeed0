"""Memory of features: a ledger of bytes, the cache, and eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence

from fxsplit_encoder.connector.books.tickets import Entry, Feature
from fxsplit_encoder.connector.states import Residence, State
from fxsplit_encoder.connector.statistics import ConnectorStats


class Ledger:
    """Accounts with limits, each of whose bytes has an owner.

    Not locked: its callers hold the connector's lock.
    """

    def __init__(self) -> None:
        self._limits: dict[str, int | None] = {}
        self._used: dict[str, int] = {}
        self._owned: dict[str, dict[Hashable, int]] = {}
        self.peaks: dict[str, int] = {}
        """The most bytes that each account had."""

    def open(self, account: str, limit: int | None) -> None:
        """Add an account of so many bytes, None: of any number; one that is open already stays as it is."""
        if account not in self._limits:
            self._limits[account], self._used[account], self._owned[account] = limit, 0, {}
            self.peaks[account] = 0

    def accounts(self) -> list[str]:
        """The names of all accounts."""
        return list(self._limits)

    def limit(self, account: str) -> int | None:
        """Bytes that the account may have."""
        return self._limits[account]

    def used(self, account: str) -> int:
        """Bytes that are reserved."""
        return self._used[account]

    def free(self, account: str) -> int:
        """Bytes that may still be reserved; of an account without a limit a very large number."""
        limit = self._limits[account]
        return 2**63 if limit is None else limit - self._used[account]

    def owned(self, account: str, owner: Hashable) -> int:
        """Bytes of one owner."""
        return self._owned[account].get(owner, 0)

    def owners(self, account: str) -> Iterator[tuple[Hashable, int]]:
        """Every owner with its bytes."""
        return iter(self._owned[account].items())

    def reserve(self, account: str, owner: Hashable, num_bytes: int) -> bool:
        """Give an owner so many bytes more; False, and nothing changes, where the limit does not allow it."""
        assert num_bytes >= 0
        if num_bytes > self.free(account):
            return False
        self._change(account, owner, num_bytes)
        return True

    def release(self, account: str, owner: Hashable, num_bytes: int | None = None) -> int:
        """Take so many bytes, None: all, from an owner; how many that were."""
        owned = self.owned(account, owner)
        num_bytes = owned if num_bytes is None else num_bytes
        assert 0 <= num_bytes <= owned, f"{account}: {owner} has {owned} bytes, not {num_bytes}"
        self._change(account, owner, -num_bytes)
        return num_bytes

    def move(self, account: str, owner: Hashable, heir: Hashable, num_bytes: int | None = None) -> None:
        """Give another owner so many bytes, None: all, of one."""
        moved = self.release(account, owner, num_bytes)
        self._change(account, heir, moved)

    def _change(self, account: str, owner: Hashable, num_bytes: int) -> None:
        owned = self._owned[account]
        if left := owned.get(owner, 0) + num_bytes:
            owned[owner] = left
        else:
            owned.pop(owner, None)
        self._used[account] += num_bytes
        self.peaks[account] = max(self.peaks[account], self._used[account])

    def problems(self) -> list[str]:
        """What does not add up; empty: nothing."""
        wrong = []
        for account, owned in self._owned.items():
            if sum(owned.values()) != self._used[account]:
                wrong.append(f"{account}: owners have {sum(owned.values())}, used are {self._used[account]}")
            if any(num_bytes <= 0 for num_bytes in owned.values()):
                wrong.append(f"{account}: an owner has no bytes")
            limit = self._limits[account]
            if limit is not None and self.peaks[account] > limit:
                wrong.append(f"{account}: {self.peaks[account]} of {limit} bytes were reserved")
        return wrong


HOST = "host"
"""The ledger's account of host buffers."""

_SMALLEST = 1 << 12


def capacity_of(num_bytes: int) -> int:
    """Bytes of the buffer for so many: a power of two, as the allocator of pinned memory makes them, so that
    the ledger counts what is really taken.
    """
    return max(_SMALLEST, 1 << (num_bytes - 1).bit_length())


class FeatureCache:
    """Entries by key, from the moment that one is being made. Entries without holders rest, and are
    evicted least recently used first.
    """

    def __init__(self) -> None:
        self.entries: dict[Entry, None] = {}
        """Every feature that is being made or kept, also those that are nobody else's."""
        self._by_key: dict[bytes, Entry] = {}
        self._resting: OrderedDict[Entry, None] = OrderedDict()

    def resting(self) -> Iterator[Entry]:
        """Entries without holders, least recently used first."""
        return iter(self._resting)

    def find(self, key: bytes) -> Entry | None:
        """The entry of a key, READY or being made."""
        return self._by_key.get(key)

    def add(self, entry: Entry) -> None:
        """From now on others may join; an entry without a key is not shared."""
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


class Storage:
    """The memory of features."""

    def __init__(self, ledger: Ledger, cache: FeatureCache, stats: ConnectorStats, device_bytes: int) -> None:
        self.ledger = ledger
        self.quarantine: dict[Feature, None] = {}
        """Features that are gone, but that a device may still read or write."""
        self.was_freed = False
        """Whether a ticket that waits for memory may have come to its turn."""
        self.idle_bytes = 0
        """Of host buffers that were let go since the allocator was last told to give memory back."""
        self._cache = cache
        self._stats = stats
        self._device_bytes = device_bytes

    # --- host

    def reserve(self, needs: Sequence[tuple[Hashable, int]], spared: Collection[Entry] = ()) -> bool:
        """Host memory for several owners, or for none of them, and then nothing is evicted."""
        self.settle()
        wanted = sum(capacity_of(num_bytes) for _, num_bytes in needs)
        missing = wanted - self.ledger.free(HOST)
        if missing > 0 and not self._evict(HOST, missing, spared):
            return False
        for owner, num_bytes in needs:
            reserved = self.ledger.reserve(HOST, owner, capacity_of(num_bytes))
            assert reserved
        return True

    def _evict(self, account: str, missing: int, spared: Collection[Entry] = ()) -> bool:
        """Free at least so many bytes of entries without holders, or none if there are not as many."""
        chosen = []
        for entry in self._cache.resting():
            feature = entry.feature
            assert feature is not None
            if missing > 0 and feature.account == account and entry not in spared and feature.is_idle:
                chosen.append(entry)
                missing -= self.ledger.owned(account, feature)
        if missing > 0:
            return False
        for entry in chosen:
            assert entry.feature is not None
            self._stats.evictions += 1
            self._stats.evicted_bytes += self.ledger.owned(account, entry.feature)
            self._cache.remove(entry)
            entry.move(State.RELEASED)
            self.drop_feature(entry)
        return True

    # --- device

    def claim_device(self, device: str, feature: Feature, num_bytes: int) -> bool:
        """Room for a feature where its encoder left it; False if there is none."""
        account = f"device {device}"
        self.ledger.open(account, self._device_bytes)
        self.settle()
        missing = num_bytes - self.ledger.free(account)
        if num_bytes > self._device_bytes or (missing > 0 and not self._evict(account, missing)):
            return False
        feature.account = account
        return self.ledger.reserve(account, feature, num_bytes)

    # --- both

    def drop_feature(self, entry: Entry) -> None:
        """Free what an entry has, now or once its reads are over."""
        if entry.feature is not None:
            feature, entry.feature = entry.feature, None
            self.free(feature)

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
            freed = self.ledger.release(feature.account, feature)
            self.idle_bytes += freed if feature.residence is Residence.HOST else 0
