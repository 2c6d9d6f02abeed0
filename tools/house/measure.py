"""`Measure`: one row of the table, and where its value comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fxsplit_encoder"
ABOUT = 1.1
"""A goal that says "about" is reached up to a tenth above it."""


@dataclass(frozen=True)
class Measure:
    """A figure, and the most that it should be.

    Args:
        goal: None: the figure is only for information.
        about: whether the goal is a rough one (`ABOUT`).
        note: a few words for the table: where the largest is.
        items: what was counted, one line each.
    """

    name: str
    value: int
    goal: int | None = None
    about: bool = False
    note: str = ""
    items: tuple[str, ...] = ()

    @property
    def ok(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        return self.value <= self.goal * (ABOUT if self.about else 1)

    def row(self) -> tuple[str, int, str, str, str]:
        """Name, value, goal, whether it is reached, and the note."""
        rough = "about " if self.about else "at most " if self.goal else ""
        goal = "" if self.goal is None else f"{rough}{self.goal}"
        return self.name, self.value, goal, {True: "yes", False: "no", None: ""}[self.ok], self.note
