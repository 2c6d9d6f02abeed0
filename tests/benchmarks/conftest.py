"""A tiny tower as the benchmarks see it, and results as a run leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from models import PackedModel
from storage import Result

ENVIRONMENT: dict[str, Any] = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "driver": "580",
    "cuda": "13.0",
    "torch": "2.11",
    "transformers": "5.17",
    "attention packages": {},
    "python": "3.12",
    "commit": "abc",
}
TOWER = "qwen3-vl-8b"


@pytest.fixture
def make_model(make_tower: Callable[..., Any]) -> Callable[[], PackedModel]:
    """Makes the same tiny tower of four blocks, 32 x 32 pixels an output token."""
    tower = make_tower()
    return lambda: PackedModel("tiny", copy.deepcopy(tower))


@pytest.fixture
def result() -> Result:
    """Two workloads by three variants, one of which failed on the larger."""
    times = {"floor": (0.3, 1.2), "eager": (15.0, 16.0), "graph-exact": (3.0, None), "ours-auto": (1.5, 20.0)}
    rows: list[dict[str, Any]] = [
        {"tower": TOWER, "workload": "start", "variant": "ours-auto", "seconds": {}}
    ]
    for workload, patches, column in (("1x224", 196, 0), ("1x448", 784, 1)):
        for variant, values in times.items():
            row = {"tower": TOWER, "workload": workload, "variant": variant, "patches": patches}
            p50 = values[column]
            rows.append({**row, "failure": "lost"} if p50 is None else {**row, "p50": p50})
    settings = {"dtype": "bfloat16", "blocks": None, "samples": 30}
    return {"case": "encoder", **ENVIRONMENT, "settings": settings, "rows": rows}
