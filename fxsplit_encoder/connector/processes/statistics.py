"""What is counted of an encoder process."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessStats:
    """Of one `ProcessEncoder`, over all processes that it has started."""

    starts: int
    """Processes that became ready."""
    losses: int
    """Processes that ended, or had to be ended, without `close`."""
    batches: int
    """Batches whose features were received."""
    items: int
    """Items of these batches."""
    splits: int
    """Calls whose inputs did not fit into shared memory at once, so that they became several batches."""
    input_bytes: int
    """Of inputs that were sent."""
    feature_bytes: int
    """Of features that were received."""
    held_bytes: int
    """Of shared memory now, inputs that the process has not released."""
    resident_bytes: int
    """Of the host's memory now, what shared memory for inputs takes."""


class Counters:
    """Sums, which several threads add to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to counts by the names of their fields."""
        with self._lock:
            self._counts.update(counts)

    def snapshot(self, held_bytes: int, resident_bytes: int) -> ProcessStats:
        """The sums as they are, beside what is held now."""
        names = ("starts", "losses", "batches", "items", "splits", "input_bytes", "feature_bytes")
        with self._lock:
            counts = {name: self._counts[name] for name in names}
        return ProcessStats(**counts, held_bytes=held_bytes, resident_bytes=resident_bytes)
