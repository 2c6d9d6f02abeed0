"""Counts of what an encoder has served."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from tabulate import tabulate

from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import MissReason

logger = logging.getLogger(__name__)

Phase = Literal["tracing", "compiling", "measuring", "capturing", "failed", "stopped", "done"]

PHASES: tuple[Phase, ...] = get_args(Phase)
"""The least advanced first; the last three are ends."""


@dataclass(frozen=True)
class CaptureProgress:
    """Progress of captures that are made while requests are served."""

    phase: Phase
    """tracing and compiling forwards; measuring them; capturing; done: the captures serve; failed: the first
    captures go on serving; stopped: by `clear`."""
    done: int = 0
    """Pieces that are compiled, or budgets that are captured; 0 in other phases."""
    total: int = 0
    """Of so many; 0: not known."""
    seconds: float = 0.0
    """Since `capture` was called; from an end on, until then."""
    reason: str = ""
    """Why it failed."""

    @property
    def is_over(self) -> bool:
        """Whether the work has ended."""
        return self.phase in PHASES[-3:]

    def __str__(self) -> str:
        count = f" {self.done} of {self.total}" if self.total else ""
        return f"{self.phase}{count}{f': {self.reason}' if self.reason else ''}, {self.seconds:.1f} s"


def least(progress: Iterable[CaptureProgress | None]) -> CaptureProgress | None:
    """Returns the least advanced of several encoders; a failure comes before what is done."""
    known = [each for each in progress if each is not None]
    return min(known, key=lambda each: PHASES.index(each.phase), default=None)


FALLBACK_KINDS = ("exact", "eager")
"""How a path runs without a replay: compiled at its exact shape, or by the tower's own forward."""


@dataclass
class BudgetStats:
    """Counts of one captured budget of one path."""

    replays: int = 0
    """How often it was replayed."""
    real_tokens: int = 0
    """Output tokens of items, over all replays."""
    padded_tokens: int = 0
    """Output tokens of padding, over all replays."""
    timed_replays: int = 0
    """How many of the replays `milliseconds` covers."""
    milliseconds: float = 0.0
    """Time of the timed replays, all together."""
    graph_bytes: int = 0
    """Device memory that the capture holds."""
    mode: str = ""
    """How it is captured, one of the configuration's modes; empty if it is not."""

    @property
    def mean_milliseconds(self) -> float | None:
        """Time of one replay; None if none was timed."""
        return self.milliseconds / self.timed_replays if self.timed_replays else None

    def plus(self, other: BudgetStats) -> BudgetStats:
        """Returns the sums of both."""
        names = [each.name for each in fields(self) if each.name != "mode"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return BudgetStats(**sums, mode=self.mode or other.mode)


@dataclass(frozen=True)
class ManagerStats:
    """A snapshot of the counts; printing it shows them as a table."""

    hits: int
    """Items that replays alone served."""
    misses: Mapping[MissReason, int]
    """Items that fell back on some path, by reason; each item counts once."""
    budgets: Mapping[CaptureKey, BudgetStats]
    """What each capture has done, by path, token budget and axis keys."""
    fallback_runs: Mapping[str, int] = field(default_factory=dict)
    """How often a path of a batch ran without a replay, by `FALLBACK_KINDS`."""
    input_bytes: int = 0
    """Device memory of the captures' static inputs."""
    progress: CaptureProgress | None = None
    """How far the work behind `capture(wait=False)` is; None: there is none."""
    derived_bytes: int = 0
    """Device memory of parameters in another form, such as padded ones (docs/passes.md)."""

    @property
    def items(self) -> int:
        """Items served in any way."""
        return self.hits + sum(self.misses.values())

    @property
    def hit_rate(self) -> float:
        """The share of hits among all items; 0.0 before the first."""
        return self.hits / self.items if self.items else 0.0

    @property
    def padding_fraction(self) -> float:
        """The share of padding in the output tokens of all replays; 0.0 before the first."""
        padded = sum(budget.padded_tokens for budget in self.budgets.values())
        real = sum(budget.real_tokens for budget in self.budgets.values())
        return padded / (padded + real) if padded + real else 0.0

    @property
    def graph_bytes(self) -> int:
        """Device memory that all captures hold."""
        return sum(budget.graph_bytes for budget in self.budgets.values())

    @classmethod
    def total(cls, parts: Iterable[ManagerStats]) -> ManagerStats:
        """Returns the counts of several encoders together; those of equal captures are added up."""
        parts = list(parts)
        misses: Counter[MissReason] = Counter()
        runs: Counter[str] = Counter()
        budgets: dict[CaptureKey, BudgetStats] = {}
        for part in parts:
            misses.update(part.misses)
            runs.update(part.fallback_runs)
            for key, stats in part.budgets.items():
                budgets[key] = budgets[key].plus(stats) if key in budgets else stats
        return cls(
            sum(part.hits for part in parts),
            dict(misses),
            {key: budgets[key] for key in sorted(budgets, key=_order)},
            dict(runs),
            sum(part.input_bytes for part in parts),
            least(part.progress for part in parts),
            sum(part.derived_bytes for part in parts),
        )

    def under(self, name: str) -> ManagerStats:
        """The same with a name before every path's."""
        budgets = {key._replace(path=f"{name} {key.path}"): stats for key, stats in self.budgets.items()}
        return replace(self, budgets=budgets)

    def as_dict(self) -> dict[str, Any]:
        """The same numbers as plain values that JSON can hold."""
        return {
            "items": self.items,
            "hits": self.hits,
            "misses": {str(reason): count for reason, count in self.misses.items()},
            "hit_rate": self.hit_rate,
            "padding_fraction": self.padding_fraction,
            "fallback_runs": dict(self.fallback_runs),
            "graph_bytes": self.graph_bytes,
            "input_bytes": self.input_bytes,
            "derived_bytes": self.derived_bytes,
            "progress": None if self.progress is None else asdict(self.progress),
            "budgets": [
                {
                    "path": key.path,
                    "token_budget": key.budget,
                    "axis_keys": [str(axis) for axis in key.axis_keys],
                    **asdict(stats),
                }
                for key, stats in self.budgets.items()
            ],
        }

    def __str__(self) -> str:
        missed = "".join(f", {count} {reason}" for reason, count in self.misses.items())
        summary = (
            f"{self.items} items: {self.hits} hit ({self.hit_rate:.1%}){missed}; "
            f"{self.padding_fraction:.1%} padding; {self.graph_bytes / 2**20:.1f} MiB, "
            f"inputs {self.input_bytes / 2**20:.1f} MiB"
        )
        if self.derived_bytes:
            summary += f", derived parameters {self.derived_bytes / 2**20:.1f} MiB"
        if self.progress is not None:
            summary += f"; captures: {self.progress}"
        headers = ["path", "budget", "mode", "MiB", "replays", "tokens", "padding", "ms a replay"]
        rows = [
            [
                " ".join(map(str, (key.path, *key.axis_keys))),
                key.budget or "exact",
                each.mode,
                each.graph_bytes / 2**20,
                each.replays,
                each.real_tokens,
                each.padded_tokens,
                each.mean_milliseconds,
            ]
            for key, each in self.budgets.items()
        ]
        return f"{summary}\n{tabulate(rows, headers, floatfmt='.2f', missingval='-')}" if rows else summary


class Statistics:
    """Counts hits, misses and replays of threads, and logs them every `log_interval` items (0: never)."""

    def __init__(self, log_interval: int = 100) -> None:
        self._log_interval = log_interval
        self._lock = threading.Lock()
        self._items = 0  # the hits and all misses
        self._hits = 0
        self._misses: Counter[MissReason] = Counter()
        self._fallback_runs: Counter[str] = Counter()
        self._input_bytes = 0
        self._budgets: defaultdict[CaptureKey, BudgetStats] = defaultdict(BudgetStats)  # what they served
        self._captures: Mapping[CaptureKey, BudgetStats] = {}  # how those that are kept were made

    def record_items(self, count: int, reason: MissReason | None = None) -> None:
        """Count the images and videos of a batch, as hits or for the `reason` that they are misses."""
        with self._lock:
            before = self._items
            self._items = after = before + count
            if reason is None:
                self._hits += count
            elif count:
                self._misses[reason] += count
        if self._log_interval and after // self._log_interval > before // self._log_interval:
            logger.info("%s", self.snapshot())

    def record_replay(self, key: CaptureKey, tokens: int) -> None:
        """Count one replay that held `tokens` output tokens of items."""
        with self._lock:
            stats = self._budgets[key]
            stats.replays += 1
            stats.real_tokens += tokens
            stats.padded_tokens += max(key.budget - tokens, 0)

    def record_fallback(self, kind: str) -> None:
        """Count one run of a path without a replay, one of `FALLBACK_KINDS`."""
        with self._lock:
            self._fallback_runs[kind] += 1

    def record_captures(self, captures: Mapping[CaptureKey, BudgetStats], input_bytes: int) -> None:
        """Replace the captures that are shown, and the device memory of their static inputs."""
        with self._lock:
            self._captures, self._input_bytes = captures, input_bytes

    def snapshot(self) -> ManagerStats:
        """Returns the counts as they are now, budgets in order of path and size."""
        with self._lock:
            keys = sorted({*self._budgets, *self._captures}, key=_order)
            none = BudgetStats()
            return ManagerStats(
                self._hits,
                dict(self._misses),
                {key: self._budgets.get(key, none).plus(self._captures.get(key, none)) for key in keys},
                dict(self._fallback_runs),
                self._input_bytes,
            )


def _order(key: CaptureKey) -> tuple[str, str, int]:
    return key.path, str(key.axis_keys), key.budget
