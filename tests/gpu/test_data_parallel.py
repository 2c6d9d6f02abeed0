"""A request shared by two GPUs through NCCL: what one process returns, and an error where a rank dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.errors import RankError
from fxsplit_encoder.models.random import demo_tower

from ..manager.data_parallel_workers import FAILING_RANK, LIMITS, SHORT, run_ranks
from .support import errors

pytestmark = pytest.mark.gpu

PATCH_FEATURES = 1536
REQUESTS = {
    "several images": [(1, 8, 8), (1, 4, 6), (1, 16, 16), (1, 2, 4), (1, 8, 12), (1, 4, 4), (1, 8, 8)],
    "over the largest budget": [(1, 20, 20), (1, 4, 4)],
    "fewer images than ranks": [(1, 8, 8)],
    "nothing": [],
}


def batch(grids: list[tuple[int, int, int]], seed: int) -> dict[str, Any]:
    """The grids as lists, which stay on the host wherever the pixels go."""
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(rows, PATCH_FEATURES, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels.bfloat16(), "image_grid_thw": [list(grid) for grid in grids]}


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    tower = demo_tower(2, "cpu", torch.bfloat16)
    inputs = {name: batch(grids, seed) for seed, (name, grids) in enumerate(REQUESTS.items())}
    good = batch([(1, 4, 4), (1, 8, 8), (1, 4, 6)], seed=9)
    return {
        "requests": {"tower": tower, "modes": ["full"], "inputs": inputs},
        "lost ranks": {"tower": tower, "good": good, "num_items": 3},
    }


@pytest.fixture(scope="module")
def ranks(two_devices: None, job: dict[str, Any], tmp_path_factory: Any) -> list[dict[str, Any]]:
    return run_ranks(2, tmp_path_factory.mktemp("ranks"), job, "nccl")


def test_every_rank_returns_what_one_process_returns(
    ranks: list[dict[str, Any]], job: dict[str, Any]
) -> None:
    config = fx.EncoderConfig(**LIMITS, mode="full")
    tower = fx.wrap(job["requests"]["tower"].to("cuda"))
    manager = fx.EncoderCudaGraphManager(tower, config, log_interval=0)
    manager.capture()
    for name, inputs in job["requests"]["inputs"].items():
        moved = {key: value.cuda() if key == "pixel_values" else value for key, value in inputs.items()}
        expected = [item.cpu() for item in manager.execute(moved)]
        assert len(expected) == len(REQUESTS[name])
        for rank in ranks:
            output = rank["full", name]
            assert len(output) == len(expected)
            if expected:  # packed otherwise, so rounded otherwise
                assert errors(output, [item.float() for item in expected]) < 0.05
        for first, second in zip(*(rank["full", name] for rank in ranks), strict=True):
            assert torch.equal(first, second)
    assert all(rank["full", "stats"].hits > 0 for rank in ranks), [
        str(rank["full", "stats"]) for rank in ranks
    ]
    manager.clear()


def test_a_rank_that_is_late_or_dead_is_an_error_within_the_timeout(ranks: list[dict[str, Any]]) -> None:
    assert "dead" not in ranks[FAILING_RANK]
    for name in ("late", "dead"):
        kind, message = ranks[1 - FAILING_RANK][name]
        assert kind is RankError
        assert "lost the others" in message
        assert f"within {SHORT}" in message
