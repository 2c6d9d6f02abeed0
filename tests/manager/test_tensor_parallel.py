"""Towers that ranks share the weights of: captured with their collectives, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.manager.data_parallel import agreement_of
from fxsplit_encoder.planning.plan import MissReason

from ..small_tower import FEATURES, SmallAdapter, SmallTower
from .tensor_parallel_workers import BATCHES, BUDGETS, PLAIN_RUNS, REFUSED, run_ranks

LIMITS = {"token_budgets": (16, 32), "max_items_per_batch": 4, "max_frames_per_batch": 8}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def batches(make_batch: Any) -> list[dict[str, Any]]:
    """Three of 12 tokens, three of 16, each of other images, in turns."""
    grids = (
        [(1, 4, 12)],
        [(1, 8, 8)],
        [(1, 4, 4), (1, 4, 8)],
        [(1, 4, 8), (1, 8, 4)],
        [(1, 12, 4)],
        [(1, 4, 4), (1, 4, 12)],
    )
    return [make_batch(images, seed=number, features=FEATURES) for number, images in enumerate(grids)]


@pytest.fixture(scope="module")
def ranks(batches: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """What each rank reports of each run; one start of the processes serves all tests."""
    runs = {mode: {"mode": mode} for mode in ("exact", "full", "auto")}
    job = {"tower": SmallTower(3), "limits": LIMITS, "batches": batches, "runs": runs, "plain": [*PLAIN_RUNS]}
    return run_ranks(2, "gloo", tmp_path_factory.mktemp("ranks"), job)


@pytest.mark.parametrize(("mode", "sizes"), [("exact", [12, 16]), ("full", [16, 32]), ("auto", [16, 32])])
def test_sglang_17255_a_sharded_tower_gives_the_results_of_the_whole_one(
    mode: str, sizes: list[int], ranks: Any
) -> None:
    for rank in ranks:
        result = rank[mode]
        assert max(result["errors"]) < 1e-5
        assert result["sizes"] == sizes
        assert any("sharded" in report for report in result["reports"])
        if mode == "exact":
            # 1, 1, 2, 2, 1 and 2 images: each size is replayed from its second time on.
            assert result["misses"] == {MissReason.NEW_SHAPE: 2}
            assert result["hits"] == 7


def test_nothing_is_agreed_upon_for_a_whole_tower() -> None:
    for whole in (SmallAdapter(), torch.nn.Linear(2, 2), object()):
        assert agreement_of(whole) is None


# --- plain modules that call collectives, as an engine's own layers do

ITEMS = sum(map(len, BATCHES))
SHARED = "captured without compiling: its weights are shared among the ranks of process_group"


def test_ranks_that_are_told_of_one_another_replay_together(ranks: Any) -> None:
    for rank in ranks:
        found = rank["plain"]
        assert found["error"] < 1e-5
        assert (found["hits"], found["modes"]) == (ITEMS, dict.fromkeys(BUDGETS, "full"))
        assert found["reports"] == [f"path default: {SHARED}"]


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
    for rank, why in zip(ranks, ("another rank", REFUSED), strict=True):
        assert any(f"{reason}{why}" in report for report in rank[run]["reports"])


def test_a_limit_that_one_rank_exceeds_costs_all_the_same_budgets(ranks: Any) -> None:
    first, second = (rank["with less memory"] for rank in ranks)
    assert first["modes"] == second["modes"]
    assert 0 < len(first["modes"]) < len(BUDGETS)
    assert max(first["error"], second["error"]) < 1e-5
    assert any("max_graph_bytes allows 1400; it gains least" in report for report in second["reports"])


def test_ranks_that_nobody_told_of_capture_nothing(ranks: Any) -> None:
    for rank in ranks:
        found = rank["not told"]
        assert (found["modes"], found["hits"]) == ({}, 0)
        assert found["error"] < 1e-5
        dropped = [report for report in found["reports"] if "is dropped" in report]
        assert len(dropped) == len(BUDGETS)
        assert all("it calls other ranks (c10d::allreduce_)" in report for report in dropped)
        assert all("pass the process_group of the ranks that share the weights" in r for r in dropped)
