"""Where the seconds of a run go."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator


class Phases:
    """Seconds of wall time by phase; those of a phase that is entered again are added."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Around what belongs to a phase; one that fails counts up to there."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin
