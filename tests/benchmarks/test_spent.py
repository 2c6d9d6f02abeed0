from __future__ import annotations

from typing import Any

import pytest
import spent
from spent import Spent


class Work:
    def outer(self) -> str:
        clock.now += 1.0
        self.inner()
        self.inner()
        return "done"

    def inner(self) -> None:
        clock.now += 4.0


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


clock = Clock()


def test_what_is_inside_of_another_kind_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent, "time", clock)
    watched: Any = ((Work, "outer", "captures"), (Work, "inner", "attention measured"))
    for owner, name, _ in watched:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back in the end
    monkeypatch.setattr(spent, "WATCHED", watched)
    counted = Spent()
    counted.watch()
    assert Work().outer() == "done"
    row = counted.row(compiling=2.5)
    assert row["spent"] == {
        "trace": 2.5,
        "pieces": 0,
        "attention measured": 8.0,
        "captures": 1.0,
        "timings": 0,
    }
    assert row["calls"]["attention measured"] == 2
    assert row["calls"]["captures"] == 1


def test_what_is_watched_is_there() -> None:
    for owner, name, kind in spent.WATCHED:
        assert callable(getattr(owner, name))
        assert kind in spent.KINDS
