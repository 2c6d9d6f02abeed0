"""How far the work behind `capture(wait=False)` is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Phase = Literal["tracing", "compiling", "measuring", "capturing", "done", "failed", "stopped"]

PHASES: tuple[Phase, ...] = get_args(Phase)
"""In order; the last three are ends."""

_ENDS = ("done", "failed", "stopped")


@dataclass(frozen=True)
class CaptureProgress:
    """Where captures that are made while requests are served stand."""

    phase: Phase
    """tracing and compiling: the towers' own forwards; measuring: what these take; capturing: the captures to
    come; done: they serve; failed: they do not, and those of the start go on serving; stopped: by `clear`."""

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
        """Whether nothing more will happen."""
        return self.phase in _ENDS

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "seconds": self.seconds,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        count = f" {self.done} of {self.total}" if self.total else ""
        return f"{self.phase}{count}{f': {self.reason}' if self.reason else ''}, {self.seconds:.1f} s"


def least(progress: Iterable[CaptureProgress | None]) -> CaptureProgress | None:
    """Of several encoders the one that is least far; a failure before what is done. None: there is none."""
    order = (*(phase for phase in PHASES if phase not in _ENDS), "failed", "stopped", "done")
    known = [each for each in progress if each is not None]
    return min(known, key=lambda each: order.index(each.phase), default=None)
