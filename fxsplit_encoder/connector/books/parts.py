"""Fair queues, and the objects that the books consist of. They change under the connector's lock."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from fxsplit_encoder.connector.books.storage import HOST, FeatureCache, Ledger, Storage
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence, Ticket
from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.request import ConnectorConfig
from fxsplit_encoder.connector.statistics import ConnectorStats
from fxsplit_encoder.encode_queue import Shares

T = TypeVar("T", bound=Hashable)


class _Tag(NamedTuple):
    finish: float
    number: int
    cost: float

    @property
    def is_first(self) -> bool:
        """Whether it goes ahead of all, and for free."""
        return self.finish == float("-inf")


def _due(tag: _Tag, served: float) -> float:
    """When a thing is due among tenants, the tenant having been served so much."""
    return tag.finish if tag.is_first else served


class _Flows(Generic[T]):
    """The things of one tenant, in the order in which they are due."""

    def __init__(self) -> None:
        self.order: list[tuple[_Tag, T]] = []
        self._tags: dict[T, tuple[_Tag, Hashable]] = {}
        self._finish: dict[Hashable, float] = {}
        self._lengths: Counter[Hashable] = Counter()
        self._virtual = 0.0
        self._number = 0

    def push(self, thing: T, flow: Hashable, cost: float, first: bool) -> None:
        start = max(self._virtual, self._finish.get(flow, 0.0))
        finish = float("-inf") if first else start + cost
        self._finish[flow] = max(start, finish)
        self._lengths[flow] += 1
        tag = _Tag(finish, self._number, cost)
        self._number += 1
        self._tags[thing] = tag, flow
        insort(self.order, (tag, thing), key=lambda entry: entry[0])

    def remove(self, thing: T, *, is_served: bool) -> _Tag:
        tag, flow = self._tags.pop(thing)
        if is_served:
            self._virtual = max(self._virtual, tag.finish)
        index = bisect_left(self.order, tag, key=lambda entry: entry[0])
        assert self.order[index][1] == thing
        del self.order[index]
        self._lengths[flow] -= 1
        if not self._lengths[flow]:
            del self._lengths[flow], self._finish[flow]
        return tag


class FairQueue(Generic[T]):
    """Self-clocked fair queuing between tenants, and within each between flows: first in first out in a flow.

    A thing is tagged, as it comes, with the virtual time at which it would be done if all flows of its tenant
    were served at once; tags decide the order. So a thing waits for at most as much work of each other flow
    as its own flow has asked for: a long video lets images pass. Tenants are served by the work that each has
    had.
    """

    def __init__(self) -> None:
        self.cost = 0.0
        """Of all things in the queue."""
        self._tenants: dict[str, _Flows[T]] = {}
        self._served: dict[str, float] = {}
        """Virtual time up to which each tenant that waits was served."""
        self._tenant_of: dict[T, str] = {}
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __iter__(self) -> Iterator[T]:
        """In the order in which they are due. The queue must not change during iteration."""
        served = dict(self._served)
        heads = [(_due(flows.order[0][0], served[name]), name, 0) for name, flows in self._tenants.items()]
        heapify(heads)
        while heads:
            _, tenant, index = heappop(heads)
            order = self._tenants[tenant].order
            tag, thing = order[index]
            yield thing
            served[tenant] += 0.0 if tag.is_first else tag.cost
            if index + 1 < len(order):
                heappush(heads, (_due(order[index + 1][0], served[tenant]), tenant, index + 1))

    def __contains__(self, thing: T) -> bool:
        return thing in self._tenant_of

    def push(self, thing: T, flow: Hashable, cost: float, tenant: str = "", *, first: bool = False) -> None:
        """Add a thing, which uses the share of a flow, such as a request; `first`: ahead of all and for free,
        since it was served before without a result.
        """
        assert thing not in self._tenant_of
        if tenant not in self._tenants:
            self._tenants[tenant], self._served[tenant] = _Flows(), self._virtual
        self._tenants[tenant].push(thing, flow, cost, first)
        self._tenant_of[thing] = tenant
        self.cost += cost

    def take(self, thing: T) -> None:
        """Remove a thing because it is served now."""
        tenant = self._tenant_of[thing]
        self._virtual = max(self._virtual, self._served[tenant])
        tag = self._remove(thing, is_served=True)
        if tenant in self._served and not tag.is_first:
            self._served[tenant] += tag.cost

    def discard(self, thing: T) -> None:
        """Remove a thing, if it is there."""
        if thing in self._tenant_of:
            self.remove(thing)

    def remove(self, thing: T) -> None:
        """Remove a thing that is not wanted any more."""
        self._remove(thing, is_served=False)

    def _remove(self, thing: T, *, is_served: bool) -> _Tag:
        tenant = self._tenant_of.pop(thing)
        flows = self._tenants[tenant]
        tag = flows.remove(thing, is_served=is_served)
        if not flows.order:
            del self._tenants[tenant], self._served[tenant]
        self.cost = self.cost - tag.cost if self._tenant_of else 0.0  # no rounding is left in an empty queue
        return tag


INPUTS = "inputs"
"""The ledger's account of preprocessed items."""

MEDIA = "media"
"""The ledger's account of raw media, of items that are not ready yet."""


@dataclass
class Parts:
    """The objects that every part of the books works on."""

    config: ConnectorConfig
    row_bytes: Callable[[Modality], int | None]
    """Of a feature's rows; None: nobody encodes the modality."""
    key_of: Callable[[bytes, str], bytes]
    """What a feature is called in the cache, from its item's digest and the salt."""
    settled: threading.Condition
    """Over the lock; told whenever a ticket has settled."""
    clock: Callable[[], float] = time.monotonic
    can_reduce: bool = False
    """Whether the processor can ask less of an item."""
    max_overtakes: int = 64
    """How many requests may get memory before one that came earlier and needs more than is free."""
    stats: ConnectorStats = field(default_factory=ConnectorStats)
    ledger: Ledger = field(default_factory=Ledger)
    cache: FeatureCache = field(default_factory=FeatureCache)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """Those that wait for something or hold something."""
    unsettled: dict[int, Ticket] = field(default_factory=dict)
    """Those of them that are not ready yet."""
    to_count: FairQueue[Ticket] = field(default_factory=FairQueue)
    """Those whose media's headers are to be read."""
    to_digest: FairQueue[Occurrence] = field(default_factory=FairQueue)
    """Also items of which less is to be asked, which are hashed again."""
    to_prepare: FairQueue[Entry] = field(default_factory=FairQueue)
    to_encode: FairQueue[Entry] = field(default_factory=FairQueue)
    to_admit: dict[int, Ticket] = field(default_factory=dict)
    """Tickets that wait for memory, in order, by number."""
    news: WeakValueDictionary[int, Ticket] = field(default_factory=WeakValueDictionary)
    """Tickets that have settled or ended, or whose token counts are new, since a step last told of them, by
    number. Weak: whoever awaits tickets and never asks for a step does not keep them alive."""
    changed: dict[int, Ticket] = field(default_factory=dict)
    """Tickets whose items have changed since `Holdings.settle`, by number."""
    woken: list[Ticket] = field(default_factory=list)
    """Tickets that are awaited and have settled."""
    waiting: Shares = field(default_factory=Shares)
    """Items that are not ready yet."""
    media: Shares = field(default_factory=Shares)
    """Bytes of their raw media."""
    turns: dict[str, int] = field(default_factory=dict)
    """By tenant that waits for memory, when it last got some."""

    def __post_init__(self) -> None:
        self.ledger.open(HOST, self.config.host_bytes)
        self.ledger.open(INPUTS, None)
        self.ledger.open(MEDIA, None)
        self.storage = Storage(self.ledger, self.cache, self.stats, self.config.device_bytes)
