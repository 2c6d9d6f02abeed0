from __future__ import annotations

from typing import Any

import pytest
import spent
from spent import Spent, shares

from fxsplit_encoder.kernels import Meter


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


def wait(seconds: float) -> float:
    clock.now += seconds
    return seconds


@pytest.fixture(autouse=True)
def made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent, "time", clock)
    monkeypatch.setattr(Meter, "_once", Meter._once)  # put back in the end


def test_what_is_inside_of_another_kind_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: Any = ((Work, "outer", "captures"), (Work, "inner", "kernels compared"))
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
        "kernels compared": 8.0,
        "captures": 1.0,
        "timings": 0,
        "kernels awaited": 0,
    }
    assert row["calls"]["kernels compared"] == 2
    assert row["calls"]["captures"] == 1


def test_kernels_are_shared_out_by_name_and_their_first_call_stands_apart() -> None:
    counted = Spent()
    found: dict[Any, float] = {}

    def once(meter: Any, key: Any, find: Any) -> Any:
        if key not in found:
            found[key] = find()
        return found[key]

    timed = counted._by_kernel(once)
    for key, seconds in ((("error", "a", 1), 3.0), (("error", "a", 2), 1.0), (("time", "a", 1), 2.0)) * 2:
        assert timed(None, key, lambda seconds=seconds: wait(seconds)) == seconds
    assert counted.kernels == {
        "a": {"first": 3.0, "checks": 1.0, "timings": 2.0, "number of checks": 2, "number of timings": 1}
    }
    row = {"start": "cold", **counted.row(compiling=1.0)}
    assert "a: first 3, number of checks 2" in shares(row)


def test_what_is_watched_is_there() -> None:
    for owner, name, kind in spent.WATCHED:
        assert callable(getattr(owner, name))
        assert kind in spent.KINDS
