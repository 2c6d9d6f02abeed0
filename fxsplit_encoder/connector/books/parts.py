"""What the books consist of. Whoever changes any of it holds the connector's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from fxsplit_encoder.connector.books.cache import FeatureCache
from fxsplit_encoder.connector.books.entry import Entry, Occurrence
from fxsplit_encoder.connector.books.fair_queue import FairQueue
from fxsplit_encoder.connector.books.host_buffers import HOST
from fxsplit_encoder.connector.books.ledger import Ledger
from fxsplit_encoder.connector.books.storage import Storage
from fxsplit_encoder.connector.books.ticket import Ticket
from fxsplit_encoder.connector.seams import Modality
from fxsplit_encoder.connector.settings import ConnectorConfig
from fxsplit_encoder.connector.statistics import ConnectorStats

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
