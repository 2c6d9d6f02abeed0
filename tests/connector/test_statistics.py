from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.request import TEXT_ONLY
from fxsplit_encoder.connector.statistics import BOUNDS, ConnectorStats, Durations

from .scenes import Stage, connector, request, wait


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_percentiles_are_bounds_that_hold(seconds: list[float]) -> None:
    durations = Durations()
    for each in seconds:
        durations.add(each)
    ordered = sorted(seconds)
    for percent in (50, 99, 100):
        bound = durations.percentile(percent)
        assert sum(each <= bound for each in ordered) * 100 >= percent * len(ordered)
        assert bound <= max(ordered[-1], 0)
    assert durations.count == len(seconds) and durations.mean == pytest.approx(sum(seconds) / len(seconds))


def test_nothing_took_no_time() -> None:
    assert (Durations().mean, Durations().percentile(99), Durations().count) == (0.0, 0.0, 0)
    assert len(Durations().counts) == len(BOUNDS) + 1
    empty = ConnectorStats()
    assert (empty.hit_rate, empty.batch_fill, empty.mean_batch_items) == (0.0, 0.0, 0.0)
    assert str(empty).startswith("0 tickets (none ended)")


def test_what_requests_came_to_is_counted() -> None:
    """One that is released, one that shares with it, one that fails and one that goes on as text."""
    stage = Stage()
    stage.faults["broken"] = lambda: ValueError("bad pixels")
    with connector(stage=stage, max_batch_items=4) as each:
        tickets = [
            each.submit(request("a")),
            each.submit(request("a", "b")),
            each.submit(request("broken")),
            each.submit(request("broken", failure=TEXT_ONLY)),
        ]
        for ticket in tickets:
            wait(ticket)
            each.release(ticket)
        stats = each.stats()
    assert (stats.submitted, stats.items, stats.text_only) == (4, 5, 1)
    assert stats.outcomes == {"released": 3, "failed": 1}
    assert stats.failures == {"encoder": 2}
    assert stats.hits + stats.joins == 2 and stats.misses == 3
    assert stats.ready.count == 3
    assert 0 < stats.batch_fill <= 1
    assert set(stats.bytes_peak) >= {"host", "inputs", "staging worker 0"}
    assert "4 tickets (1 failed, 3 released), 5 items" in str(stats)
    assert json.loads(json.dumps(stats.as_dict()))["submitted"] == 4
