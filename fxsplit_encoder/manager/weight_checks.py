"""When captures look again whether their parameters have moved or changed."""

from __future__ import annotations

import time
from collections.abc import Hashable


class WeightChecks:
    """Which replays check the parameters that they read.

    Args:
        seconds: between two checks of a path; 0: each of its replays.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.are_always_due = not seconds
        self._last: dict[Hashable, float] = {}

    def is_due(self, path: Hashable) -> bool:
        """Whether the replay that comes has to check; it is taken to do so."""
        if self.are_always_due:
            return True
        now, last = time.monotonic(), self._last.get(path)
        if last is not None and now < last + self._seconds:
            return False
        self._last[path] = now
        return True

    def all_are_due(self) -> None:
        """Has the next replay of every path check."""
        self._last.clear()
