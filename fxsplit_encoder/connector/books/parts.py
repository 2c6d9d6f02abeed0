"""The objects that the books consist of. They change under the connector's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from fxsplit_encoder.connector.books.storage import HOST, FeatureCache, Ledger, Storage
from fxsplit_encoder.connector.books.tickets import Entry, Occurrence, Ticket
from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.request import ConnectorConfig
from fxsplit_encoder.connector.statistics import ConnectorStats
from fxsplit_encoder.encode_queue.fair_queue import FairQueue, Shares

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
