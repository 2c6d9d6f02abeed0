import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest

from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.runtime.statistics import BudgetStats, ManagerStats, Statistics


def test_nothing_served_yet() -> None:
    stats = Statistics().snapshot()
    assert stats == ManagerStats(0, {}, {})
    assert (stats.items, stats.hit_rate, stats.padding_fraction, stats.graph_bytes) == (0, 0.0, 0.0, 0)
    assert str(stats) == "0 items: 0 hit (0.0%); 0.0% padding; 0.0 MiB, inputs 0.0 MiB"
    assert str(replace(stats, derived_bytes=2**19)).endswith(", inputs 0.0 MiB, derived parameters 0.5 MiB")


def test_replays_add_up_for_each_path_and_budget() -> None:
    statistics = Statistics()
    made = BudgetStats(mode="piecewise", graph_bytes=2**20, timed_replays=1, milliseconds=3.0)
    statistics.record_captures({CaptureKey("local", 64): made}, 0)
    for path, budget, tokens in (("local", 64, 48), ("local", 64, 64), ("global", 128, 32)):
        statistics.record_replay(CaptureKey(path, budget), tokens)
    stats = statistics.snapshot()
    assert list(stats.budgets.items()) == [
        (CaptureKey("global", 128), BudgetStats(1, 32, 96)),
        (CaptureKey("local", 64), BudgetStats(2, 112, 16, 1, 3.0, 2**20, "piecewise")),
    ]
    assert stats.items == 0  # paths and replays are not items
    assert (stats.padding_fraction, stats.graph_bytes) == (112 / 256, 2**20)
    assert [each.mean_milliseconds for each in stats.budgets.values()] == [None, 3.0]


def test_released_captures_hold_no_memory_but_stay_counted() -> None:
    statistics = Statistics()
    kept, exact = BudgetStats(mode="full", graph_bytes=9), BudgetStats(mode="exact", graph_bytes=7)
    statistics.record_captures({CaptureKey("default", 0): exact, CaptureKey("default", 64): kept}, 5)
    statistics.record_replay(CaptureKey("default", 64), 64)
    assert statistics.snapshot().budgets == {
        CaptureKey("default", 0): exact,
        CaptureKey("default", 64): BudgetStats(1, 64, 0, graph_bytes=9, mode="full"),
    }
    statistics.record_captures({}, 0)
    assert statistics.snapshot().budgets == {CaptureKey("default", 64): BudgetStats(1, 64, 0)}


def test_printing_and_export_show_the_same_numbers() -> None:
    statistics = Statistics()
    made = BudgetStats(mode="full", graph_bytes=3 * 2**20, timed_replays=1, milliseconds=1.25)
    statistics.record_captures({CaptureKey("default", 64): made}, 0)
    statistics.record_replay(CaptureKey("default", 64), 48)
    statistics.record_replay(CaptureKey("default", 128), 128)
    statistics.record_items(3)
    statistics.record_items(1, MissReason.NOT_CAPTURED)
    statistics.record_items(0, MissReason.DISABLED)
    stats = statistics.snapshot()
    assert (stats.items, stats.hits, stats.misses) == (4, 3, {MissReason.NOT_CAPTURED: 1})
    summary, header, _, *rows = str(stats).splitlines()
    assert summary == "4 items: 3 hit (75.0%), 1 not_captured; 8.3% padding; 3.0 MiB, inputs 0.0 MiB"
    assert header.split("  ")[0] == "path"
    assert [row.split() for row in rows] == [
        ["default", "64", "full", "3.00", "1", "48", "16", "1.25"],
        ["default", "128", "0.00", "1", "128", "0", "-"],
    ]
    exported = json.loads(json.dumps(stats.as_dict()))
    assert exported["misses"] == {"not_captured": 1}
    assert (exported["items"], exported["hits"], exported["hit_rate"]) == (4, 3, 0.75)
    assert (exported["padding_fraction"], exported["graph_bytes"]) == (16 / 192, 3 * 2**20)
    key = {"path": "default", "token_budget": 64, "axis_keys": []}
    assert exported["budgets"][0] == key | asdict(stats.budgets["default", 64, ()])


def test_a_line_is_logged_whenever_a_multiple_is_crossed(caplog: pytest.LogCaptureFixture) -> None:
    statistics = Statistics(log_interval=10)
    lines = []
    with caplog.at_level(logging.INFO, logger="fxsplit_encoder"):
        for count in (9, 2, 8, 1, 25, 0):
            statistics.record_items(count)
            lines.append(len(caplog.records))
    # After 9, 11, 19, 20, 45 and 45 items.
    assert lines == [0, 1, 1, 2, 3, 3]
    assert caplog.messages[0] == "11 items: 11 hit (100.0%); 0.0% padding; 0.0 MiB, inputs 0.0 MiB"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="fxsplit_encoder"):
        Statistics(log_interval=0).record_items(1000)
    assert caplog.records == []


def test_threads_lose_no_counts() -> None:
    statistics = Statistics(log_interval=0)

    def serve(_: int) -> None:
        statistics.record_items(1)
        statistics.record_items(1, MissReason.DISABLED)
        statistics.record_replay(CaptureKey("default", 64), 60)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(serve, range(2000)))
    stats = statistics.snapshot()
    assert (stats.hits, stats.misses) == (2000, {MissReason.DISABLED: 2000})
    assert stats.budgets["default", 64, ()] == BudgetStats(2000, 120000, 8000)
