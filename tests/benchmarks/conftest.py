"""A tiny tower as the benchmark sees it, and results as a run leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from records import Records
from subjects import PackedSubject

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580",
    "cuda": "13.0",
    "torch": "2.11",
    "transformers": "5.17",
    "python": "3.12",
    "commit": "abc",
}
SETTINGS = {"dtype": "bfloat16", "blocks": None, "quick": False, "samples": 30}
TOWER = "qwen3-vl-8b"


@pytest.fixture
def make_subject(make_tower: Callable[..., Any]) -> Callable[[], PackedSubject]:
    """Makes the same tiny tower of four blocks, 32 x 32 pixels an output token."""
    tower = make_tower()
    return lambda: PackedSubject("tiny", copy.deepcopy(tower))


@pytest.fixture
def records() -> Records:
    """Two workloads by three contenders, one of which failed on the larger."""
    found = Records(dict(ENVIRONMENT), dict(SETTINGS))
    found.add(TOWER, "floor", {"event": "rate", "gemm_flops_per_second": 8e14})
    for name, patches, flops in (("1x224", 196, 2.4e11), ("1x448", 784, 9.6e11)):
        shape = {"series": True, "patches": [patches], "items": [1], "flops": [flops]}
        found.add(TOWER, "floor", {"event": "workload", "workload": name, **shape})
    for contender, times in {
        "eager": (15.0, 16.0),
        "graph-exact": (3.0, None),
        "ours-auto": (1.5, 20.0),
    }.items():
        found.add(TOWER, contender, {"event": "start", "seconds": {"start": 2.0}, "bytes": 2**20})
        for name, p50 in zip(("1x224", "1x448"), times, strict=True):
            row = {"event": "row", "workload": name}
            timed = {"p50": p50, "p99": p50, "cpu": 1.0, "gpu": p50, "bytes": 2**21, "prepare_seconds": 3.0}
            found.add(TOWER, contender, {**row, "failure": "lost"} if p50 is None else {**row, **timed})
    return found
