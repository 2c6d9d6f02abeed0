"""Tensor parallelism of plain modules that call collectives, as an engine's own layers do."""

from __future__ import annotations

from typing import Any

import pytest

from .plain_parallel_workers import BATCHES, BUDGETS, NO_ROOM, run_ranks

pytestmark = pytest.mark.slow

ITEMS = sum(map(len, BATCHES))
SHARED = "captured without compiling: its weights are shared among the ranks of process_group"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> list[dict[str, Any]]:
    """One start of the processes serves all tests."""
    return run_ranks(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("run", ["full", "auto"])
def test_ranks_that_are_told_of_one_another_replay_together(run: str, ranks: Any) -> None:
    for rank in ranks:
        assert rank[run]["error"] < 1e-5
        assert rank[run]["hits"] == ITEMS
        assert rank[run]["modes"] == dict.fromkeys(BUDGETS, "full")
        assert rank[run]["reports"] == [f"path default: {SHARED}"]


def test_counts_that_recur_are_captured_together(ranks: Any) -> None:
    for rank in ranks:
        assert rank["exact"]["error"] < 1e-5
        assert rank["exact"]["sizes"] == [3]
        assert rank["exact"]["hits"] == 4


@pytest.mark.parametrize(
    ("run", "modes", "reason"),
    [
        ("without inputs", {4: "full", 16: "full"}, "budget 8 is dropped: "),
        (
            "without one graph",
            {4: "full", 8: "breakable", 16: "full"},
            "budget 8 is captured in mode breakable: in mode full ",
        ),
    ],
)
def test_what_one_rank_cannot_do_none_does(run: str, modes: Any, reason: str, ranks: Any) -> None:
    for rank in ranks:
        assert rank[run]["error"] < 1e-5
        assert rank[run]["modes"] == modes
        assert rank[run]["hits"] == ITEMS
    for rank, why in zip(ranks, ("another rank", NO_ROOM), strict=True):
        assert any(f"{reason}{why}" in report for report in rank[run]["reports"])


def test_a_limit_that_one_rank_exceeds_costs_all_the_same_budgets(ranks: Any) -> None:
    first, second = (rank["with less memory"] for rank in ranks)
    assert first["modes"] == second["modes"]
    assert 0 < len(first["modes"]) < len(BUDGETS)
    assert max(first["error"], second["error"]) < 1e-5
    assert any("max_graph_bytes allows 1400; it gains least" in report for report in second["reports"])


@pytest.mark.parametrize("run", ["not told", "not told, traced"])
def test_ranks_that_nobody_told_of_capture_nothing(run: str, ranks: Any) -> None:
    for rank in ranks:
        assert rank[run]["modes"] == {}
        assert rank[run]["hits"] == 0
        assert rank[run]["error"] < 1e-5
        dropped = [report for report in rank[run]["reports"] if "is dropped" in report]
        assert len(dropped) == len(BUDGETS)
        assert all("it calls other ranks (c10d::allreduce_)" in report for report in dropped)
        assert all("pass the process_group of the ranks that share the weights" in r for r in dropped)
