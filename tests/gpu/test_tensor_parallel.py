"""A sharded tower on two GPUs, through NCCL: captured with its collectives, equal to the whole tower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxsplit_encoder.models.random import demo_tower

from ..manager.tensor_parallel_workers import run_ranks
from .support import seeded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_devices")]

LIMITS = {"token_budgets": (64, 256), "max_items_per_batch": 4, "max_frames_per_batch": 0}


@pytest.mark.parametrize("mode", ["exact", "full"])
def test_sglang_17255_a_sharded_tower_is_captured_with_its_collectives(mode: str, tmp_path: Path) -> None:
    tower = demo_tower(4, "cpu", torch.bfloat16)
    grids = (
        [(1, 16, 16)],
        [(1, 8, 16), (1, 16, 8)],
        [(1, 8, 32)],
        [(1, 12, 16)],
        [(1, 16, 12)],
        [(1, 16, 16)],
    )
    batches = [seeded(images, 1536, seed) for seed, images in enumerate(grids)]
    job = {"tower": tower, "limits": LIMITS, "batches": batches, "runs": {mode: {"mode": mode}}}
    for rank in run_ranks(2, "nccl", tmp_path, job):
        result = rank[mode]
        assert max(result["errors"]) < 0.05
        assert result["sizes"] == ([48, 64] if mode == "exact" else [64, 256])
        assert result["hits"] == (5 if mode == "exact" else 7)
