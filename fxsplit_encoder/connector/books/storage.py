"""Where features lie: memory is reserved before work, taken from what nobody holds, and never while in
use.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from fxsplit_encoder.connector.books.cache import FeatureCache
from fxsplit_encoder.connector.books.entry import Entry, Feature
from fxsplit_encoder.connector.books.host_buffers import HOST, HostBuffers, capacity_of
from fxsplit_encoder.connector.books.ledger import Ledger
from fxsplit_encoder.connector.states import Residence, State
from fxsplit_encoder.connector.statistics import ConnectorStats


class Storage:
    """The memory of features.

    Args:
        ledger: of all accounts.
        cache: whose resting features may make way.
        stats: where evictions are counted.
        device_bytes: for features on each device.
    """

    def __init__(self, ledger: Ledger, cache: FeatureCache, stats: ConnectorStats, device_bytes: int) -> None:
        self.ledger = ledger
        self.buffers = HostBuffers(ledger, stats)
        self.quarantine: dict[Feature, None] = {}
        """Features that are gone, but that a device may still read or write."""
        self.was_freed = False
        """Whether a ticket that waits for memory may have come to its turn."""
        self._cache = cache
        self._stats = stats
        self._device_bytes = device_bytes

    # --- host

    def reserve(self, needs: Sequence[tuple[Hashable, int]], spared: Collection[Entry] = ()) -> bool:
        """Host memory for several owners, or for none of them: then nothing is evicted in vain.

        Args:
            needs: owners, each with its bytes.
            spared: features that are not evicted.
        """
        self.settle()
        wanted = sum(capacity_of(num_bytes) for _, num_bytes in needs)
        missing = wanted - self.buffers.available()
        if missing > 0 and not self._evict(HOST, missing, spared):
            return False
        for owner, num_bytes in needs:
            reserved = self.buffers.reserve(owner, num_bytes)
            assert reserved
        return True

    def _evict(self, account: str, missing: int, spared: Collection[Entry] = ()) -> bool:
        """Frees at least so many bytes, of what nobody holds, or none if there are not as many."""
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
        """Free what an entry has, now or as soon as nobody reads it any more."""
        if entry.feature is not None:
            feature, entry.feature = entry.feature, None
            self.free(feature)

    def free(self, feature: Feature) -> None:
        """Free rows that nobody finds any more, now or as soon as no device uses them."""
        self.quarantine[feature] = None
        self.settle()

    def settle(self) -> None:
        """Free what is in quarantine and not in use any more."""
        for feature in [feature for feature in self.quarantine if feature.is_idle]:
            del self.quarantine[feature]
            self.was_freed = True
            feature.rows = None
            if feature.residence is Residence.HOST:
                self.buffers.release(feature)
            else:
                self.ledger.release(feature.account, feature)
