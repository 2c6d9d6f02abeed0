"""Where the time of compiling and capturing goes, as seconds of each kind of work alone."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fxsplit_encoder.attention.kernels import ahead
from fxsplit_encoder.capture import CapturedForward, timing
from fxsplit_encoder.compile.pieces import PieceCache
from fxsplit_encoder.kernels import Meter

WATCHED = (
    (PieceCache, "get", "pieces"),
    (Meter, "measure", "kernels compared"),
    (CapturedForward, "_warm_up", "captures"),
    (CapturedForward, "_record", "captures"),
    (timing, "_timed", "timings"),
    (ahead, "wait", "kernels awaited"),
)
KINDS = tuple(dict.fromkeys(kind for *_, kind in WATCHED))

_MOST_PHASES = 24


class Spent:
    """Seconds and calls of each kind of work. Kernels that are compared inside a capture or a timing are
    counted as that, and not as the capture or the timing.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.kernels: dict[str, Counter[str]] = {}
        """Of each kernel that was compared: seconds of its "first" call, which may compile it, of the later
        "checks" and of its "timings", and how many of either there were."""
        self._inner = [0.0]
        """For every call under way, the seconds of those inside it."""

    def watch(self) -> None:
        """Counts from now on, in this process for good."""
        for owner, name, kind in WATCHED:
            setattr(owner, name, self._watched(getattr(owner, name), kind))
        Meter._once = self._by_kernel(Meter._once)  # type: ignore[method-assign]

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

    def _by_kernel(self, once: Any) -> Any:
        @functools.wraps(once)
        def timed(meter: Any, key: tuple[Any, ...], find: Any) -> Any:
            def finding() -> Any:
                spent = self.kernels.setdefault(key[1], Counter())
                what = "timings" if key[0] == "time" else "checks"
                begin = time.perf_counter()
                try:
                    return find()
                finally:
                    spent["first" if not spent else what] += time.perf_counter() - begin
                    spent[f"number of {what}"] += 1

            return once(meter, key, finding)

        return timed

    def row(self, compiling: float) -> dict[str, Any]:
        """Seconds by kind, "trace" being what compiling took without the pieces; the calls; seconds by kernel
        that was compared, and by what torch calls its phases, which lie inside one another.

        Args:
            compiling: seconds of `manager.compile`.
        """
        kinds = {kind: self.seconds[kind] for kind in KINDS}
        trace = compiling - kinds["pieces"]
        return {
            "spent": {"trace": trace, **kinds},
            "calls": {kind: self.calls[kind] for kind in KINDS},
            "kernels spent": {name: dict(spent) for name, spent in self.kernels.items()},
            "torch spent": torch_phases(),
        }


def torch_phases() -> dict[str, float]:
    """Seconds of each phase of torch's compiler, the longest first."""
    import torch

    phases: dict[str, list[float]] = getattr(torch._dynamo.utils, "compilation_time_metrics", {})
    total = {name: sum(seconds) for name, seconds in phases.items()}
    return dict(sorted(total.items(), key=lambda each: -each[1])[:_MOST_PHASES])


def shares(row: Mapping[str, Any]) -> str:
    """What a row of `Spent` says, for reading."""
    lines = [f"{row['start']}: seconds " + _seconds(row["spent"]), f"  calls {row['calls']}"]
    by_kernel = row["kernels spent"].items()
    lines += [f"  {name}: {_seconds(spent)}" for name, spent in by_kernel]
    return "\n".join([*lines, "  torch: " + _seconds(row["torch spent"])])


def _seconds(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
