"""What was measured of a budget, and what another ladder found out of it."""

from __future__ import annotations

from dataclasses import dataclass

# Where the host needs less than this share of the time that an exact run keeps the device busy, the device
# never waits for it, and a replay has little to gain: such a budget is not captured to be measured, which
# would take longest where the budget is large. The share is a choice, not a measurement.
_HIDDEN_HOST = 0.5

# Where it needs more than this share, the host hardly keeps ahead of the device: the run takes that long only
# while nothing else wants the processor, which it keeps busy all the time. Such a run counts for more than it
# took. Both figures are choices.
_BUSY_HOST = 0.75
_BUSY_HOST_PRICE = 1.05


@dataclass(slots=True)
class MeasuredCosts:
    """Milliseconds of one budget, full to its last row by one segment."""

    modes: dict[str, float]
    """Of a replay in each mode that was captured; none where the exact run alone decided."""
    exact: float
    """Of the forward at its exact shape."""
    host: float = 0.0
    """What the host needs to launch it."""
    attention: float = 0.0
    """Of `exact`, the attention over the one segment, which a batch of many short ones does without."""
    single_segment: float | None = None
    """Of a replay of the capture for one segment, where there is one."""

    @property
    def hides_host(self) -> bool:
        """Whether the device works so long that it never waits for the host."""
        return self.host < _HIDDEN_HOST * (self.exact - self.attention)

    @property
    def exact_price(self) -> float:
        """What an exact run counts when it is compared with a replay: where the host is about as busy as the
        device, 5 % more than it took beside attention, which a batch of short segments does without.
        """
        beside = max(0.0, self.exact - self.attention)  # two measurements: the first may be the smaller one
        busy = self.host > _BUSY_HOST * beside
        return self.exact + beside * (_BUSY_HOST_PRICE - 1) if busy else self.exact

    @property
    def best(self) -> float:
        """Of a replay in the mode that was kept."""
        return min(self.modes.values())


@dataclass(frozen=True, slots=True)
class KnownBudget:
    """What another ladder of the same forward found out of a budget."""

    costs: MeasuredCosts
    mode: str | None
    """In which it is captured; None: it needs no graph."""
