"""Counts of the connector's work."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

BOUNDS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1, 2, 5))
"""Upper bounds of the buckets that durations are counted in, in seconds: 0.1 ms to 50 s."""


@dataclass
class Durations:
    """How long something took, as a histogram."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    """By bucket; the last one is above every bound."""
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Seconds; 0.0 before the first."""
        return self.total / self.count if self.count else 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass
class ConnectorStats:
    """A snapshot of the counts."""

    submitted: int = 0
    """Tickets."""
    items: int = 0
    """Items of all tickets."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Tickets by the state in which they ended; one that was held again and ended again counts twice."""
    text_only: int = 0
    """Tickets that went on without their media."""
    failures: Counter[str] = field(default_factory=Counter)
    """Items that failed, by kind."""
    refused: int = 0
    """Requests for which too much was waiting already."""
    hits: int = 0
    """Items whose rows were there."""
    joins: int = 0
    """Items whose rows were being made for another already."""
    misses: int = 0
    """Items that had to be encoded."""
    evictions: int = 0
    """Features that nobody held and that made way for others."""
    evicted_bytes: int = 0
    retries: int = 0
    """Encodings for which a request's policy asked after an error."""
    reductions: int = 0
    """Items of which less was asked after memory ran out."""
    split_batches: int = 0
    """Batches that failed and were halved."""
    lost_workers: int = 0
    worker_restarts: int = 0
    batches: int = 0
    batch_items: int = 0
    batch_tokens: int = 0
    discarded: int = 0
    """Features that were encoded when nobody wanted them any more."""
    prepare: Durations = field(default_factory=Durations)
    """Hashing, decoding and preprocessing of one item that was not there."""
    queue: Durations = field(default_factory=Durations)
    """From being preprocessed to being taken into a batch."""
    encode: Durations = field(default_factory=Durations)
    """From being taken into a batch to being ready."""
    ready: Durations = field(default_factory=Durations)
    """From the submission of a ticket to its being ready."""
    bytes_used: Mapping[str, int] = field(default_factory=dict)
    """By account of the ledger, now."""
    bytes_peak: Mapping[str, int] = field(default_factory=dict)
    """The most that it was."""
    waiting_items: int = 0
    """Items that are not ready yet, now."""
    live_tickets: int = 0
    """Tickets that wait for something or hold something, now."""
    max_batch_items: int = 0
    """The most that a batch may have."""

    @property
    def hit_rate(self) -> float:
        """The share of items that were not encoded on their own account; 0.0 before the first."""
        looked_up = self.hits + self.joins + self.misses
        return (self.hits + self.joins) / looked_up if looked_up else 0.0

    @property
    def batch_fill(self) -> float:
        """The share of the places in batches that items had; 0.0 before the first."""
        places = self.batches * self.max_batch_items
        return self.batch_items / places if places else 0.0
