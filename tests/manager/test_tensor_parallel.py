"""A tower sharded by `torch.distributed.tensor.parallel`: captured with its collectives, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.manager.data_parallel import agreement_of
from fxsplit_encoder.planning import MissReason

from .tensor_parallel_workers import REFUSED, run_ranks

LIMITS = {"token_budgets": (16, 32), "max_items_per_batch": 4, "max_frames_per_batch": 8}


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
    return [make_batch(images, seed=number) for number, images in enumerate(grids)]


@pytest.fixture(scope="module")
def ranks(batches: Any, make_tower: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """What each rank reports of each run; one start of the processes serves all tests."""
    runs = {mode: {"mode": mode} for mode in ("exact", "full", "auto")}
    runs["refusing"] = {"mode": "exact", "refusing_rank": 1, "refused_tokens": 12}
    job = {"tower": make_tower(3), "limits": LIMITS, "batches": batches, "runs": runs}
    return run_ranks(2, "gloo", tmp_path_factory.mktemp("ranks"), job)


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_one_rank_cannot_capture_none_captures(ranks: Any) -> None:
    results = [rank["refusing"] for rank in ranks]
    for result in results:
        assert max(result["errors"]) < 1e-5
        assert result["sizes"] == [16]
    assert REFUSED in results[1]["refused"][12]
    assert "another rank" in results[0]["refused"][12]


def test_nothing_is_agreed_upon_for_a_whole_tower(tiny_towers: Any) -> None:
    assert agreement_of(tiny_towers.wrapped) is None
    assert agreement_of(torch.nn.Linear(2, 2)) is None
    assert agreement_of(object()) is None
