"""Where the time of compiling and capturing goes, as seconds of each kind of work alone."""

from __future__ import annotations

import functools
import time
from collections import Counter
from typing import Any

from fxsplit_encoder.attention.measure import Meter
from fxsplit_encoder.capture import CapturedForward, ladder
from fxsplit_encoder.compile.pieces import PieceCache
from fxsplit_encoder.runtime import measure

WATCHED = (
    (PieceCache, "get", "pieces"),
    (Meter, "measure", "attention measured"),
    (CapturedForward, "record", "captures"),
    (CapturedForward, "measure", "timings"),
    (ladder, "measure_run", "timings"),
    (measure, "measure_ms", "timings"),
)
KINDS = tuple(dict.fromkeys(kind for *_, kind in WATCHED))


class Spent:
    """Seconds and calls of each kind of work. What is measured of attention inside a capture or a timing is
    counted as that, and not as the capture or the timing.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = [0.0]
        """For every call under way, the seconds of those inside it."""

    def watch(self) -> None:
        """Counts from now on, in this process for good."""
        for owner, name, kind in WATCHED:
            setattr(owner, name, self._watched(getattr(owner, name), kind))

    def _watched(self, function: Any, kind: str) -> Any:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total = time.perf_counter() - begin
                self.seconds[kind] += total - self._inner.pop()
                self.calls[kind] += 1
                self._inner[-1] += total

        return watched

    def row(self, compiling: float) -> dict[str, Any]:
        """Seconds by kind, "trace" being what compiling took without the pieces; and the calls.

        Args:
            compiling: seconds of `manager.compile`.
        """
        kinds = {kind: self.seconds[kind] for kind in KINDS}
        trace = compiling - kinds["pieces"]
        return {"spent": {"trace": trace, **kinds}, "calls": {kind: self.calls[kind] for kind in KINDS}}
