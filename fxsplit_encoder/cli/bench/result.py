"""What was measured, and the one line of advice that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OURS = "ours"

# Less is within the noise of a measurement.
_WORTH = 1.05


@dataclass
class Measured:
    """One batch by every way."""

    item: str
    """The image, or how many of them."""
    size: str
    """In pixels; of several images empty."""
    patches: str
    """Patches or tiles, as the family counts."""
    tokens: int
    ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds by the way's name; one that failed or cannot run is not in it."""
    padding: float = 0.0
    """The share of padding in what ours replays."""

    @property
    def best_other(self) -> tuple[str, float] | None:
        """The fastest of the others, and its time; None: nothing else was measured."""
        others = {name: ms for name, ms in self.ms.items() if name != OURS}
        return min(others.items(), key=lambda each: each[1]) if others else None

    @property
    def gain(self) -> float | None:
        """How many times as fast ours is as the best of the others; None: not both were measured."""
        best = self.best_other
        return best[1] / self.ms[OURS] if best and OURS in self.ms else None

    def times_of(self, way: str) -> float | None:
        """How many times as fast ours is as one way; None: not both were measured."""
        return self.ms[way] / self.ms[OURS] if way in self.ms and OURS in self.ms else None


def advice(rows: Sequence[Measured], titles: Mapping[str, str]) -> str:
    """What to do, in a line.

    Args:
        rows: measured on a GPU.
        titles: of the ways, by name.
    """
    gains = {index: gain for index, row in enumerate(rows) if (gain := row.gain) is not None}
    if not gains:
        return "No advice: ours or everything else was not measured."
    worth = [rows[index] for index, gain in gains.items() if gain >= _WORTH]
    others = [rows[index] for index, gain in gains.items() if gain < _WORTH]
    if not worth:
        return f"Nothing to gain on these images: {_bests(others, titles)} is as fast."
    found = f"Use the manager: {_range([row.gain for row in worth])} times as fast as the best other way"
    eager = [times for row in worth if (times := row.times_of("eager")) is not None]
    if eager:
        found += f", {_range(eager)} times as fast as eager"
    if not others:
        return f"{found}."
    named = ", ".join(row.item for row in others)
    return f"{found}; nothing to gain on {named}, where {_bests(others, titles)} is as fast."


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} to {high}"


def _bests(rows: Sequence[Measured], titles: Mapping[str, str]) -> str:
    names = dict.fromkeys(titles[best[0]] for row in rows if (best := row.best_other) is not None)
    return " or ".join(names)
