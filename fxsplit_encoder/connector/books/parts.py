"""Fair queues, and the objects that the books consist of. They change under the connector's lock."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from fxsplit_encoder.connector.books.storage import HOST, FeatureCache, Ledger, Storage
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence, Ticket
from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.request import ConnectorConfig
from fxsplit_encoder.connector.statistics import ConnectorStats

T = TypeVar("T", bound=Hashable)


class _Tag(NamedTuple):
    finish: float
    number: int
    cost: float


class FairQueue(Generic[T]):
    """Self-clocked fair queuing between flows, first in first out within one and among equals.

    A thing is tagged, as it comes, with the virtual time at which it would be done if all flows were served
    at once; tags decide the order. So a thing waits for at most as much work of each other flow as its own
    flow has asked for: a long video lets images pass, and a flow of many things lets others between them.
    """

    def __init__(self) -> None:
        self.cost = 0.0
        """Of all things in the queue."""
        self._order: list[tuple[_Tag, T]] = []
        self._tags: dict[T, tuple[_Tag, Hashable]] = {}
        self._finish: dict[Hashable, float] = {}
        self._lengths: Counter[Hashable] = Counter()
        self._virtual = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        """In the order in which they are due. The queue must not change meanwhile."""
        return (thing for _, thing in self._order)

    def __contains__(self, thing: T) -> bool:
        return thing in self._tags

    def push(self, thing: T, flow: Hashable, cost: float, *, first: bool = False) -> None:
        """Add a thing.

        Args:
            thing: is not in the queue.
            flow: whose share it uses, such as a request.
            cost: not negative, in any unit.
            first: ahead of all, and for free: it was served before, in vain.
        """
        assert thing not in self._tags
        start = max(self._virtual, self._finish.get(flow, 0.0))
        finish = float("-inf") if first else start + cost
        self._finish[flow] = max(start, finish)
        self._lengths[flow] += 1
        tag = _Tag(finish, self._number, cost)
        self._number += 1
        self.cost += cost
        self._tags[thing] = tag, flow
        insort(self._order, (tag, thing), key=lambda entry: entry[0])

    def take(self, thing: T) -> None:
        """Remove a thing because it is served now."""
        finish = self._tags[thing][0].finish
        self._virtual = max(self._virtual, finish)
        self.remove(thing)

    def discard(self, thing: T) -> None:
        """Remove a thing, if it is there."""
        if thing in self._tags:
            self.remove(thing)

    def remove(self, thing: T) -> None:
        """Remove a thing because nobody wants it any more."""
        tag, flow = self._tags.pop(thing)
        index = bisect_left(self._order, tag, key=lambda entry: entry[0])
        assert self._order[index][1] == thing
        del self._order[index]
        self.cost = self.cost - tag.cost if self._order else 0.0  # no rounding is left in an empty queue
        self._lengths[flow] -= 1
        if not self._lengths[flow]:
            del self._lengths[flow], self._finish[flow]


INPUTS = "inputs"
"""The ledger's account of preprocessed items."""


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
    stats: ConnectorStats = field(default_factory=ConnectorStats)
    ledger: Ledger = field(default_factory=Ledger)
    cache: FeatureCache = field(default_factory=FeatureCache)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """Those that wait for something or hold something."""
    unsettled: dict[int, Ticket] = field(default_factory=dict)
    """Those of them that are not ready yet."""
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
    num_waiting: int = 0
    """Items that are not ready yet, of tickets that were not refused."""

    def __post_init__(self) -> None:
        self.ledger.open(HOST, self.config.host_bytes)
        self.ledger.open(INPUTS, None)
        self.storage = Storage(self.ledger, self.cache, self.stats, self.config.device_bytes)
