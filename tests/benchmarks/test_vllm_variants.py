"""vLLM's variants as far as they go without vLLM and a GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_variants
from vllm_variants import CONTENDERS, VllmEager, VllmManager, vllm_inputs
from worker import _measure, settle
from workloads import WORKLOADS


def test_they_run_last() -> None:
    assert list(CONTENDERS)[-2:] == ["vllm-eager", "vllm"]


@pytest.mark.parametrize("variant", [VllmEager, VllmManager])
def test_where_they_cannot_run(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_variants, "vllm_or_none", lambda: None)
    assert variant.unavailable("packed", "cpu") == "needs CUDA graphs"
    assert variant.unavailable("packed", "cuda") == "vLLM is not installed"
    monkeypatch.setattr(vllm_variants, "vllm_or_none", lambda: "0.33.0")
    assert variant.unavailable("packed", "cuda") is None


def test_towers_and_workloads_that_are_left_out() -> None:
    packed = WORKLOADS["packed"]
    known = VllmEager(SimpleNamespace(name="qwen3-vl-8b"), {})  # type: ignore[arg-type]
    assert known.why_not(packed["1x448"]) is None
    assert known.why_not(packed["clip16"]) == "videos are left out"
    other = VllmEager(SimpleNamespace(name="glm-4.1v-9b"), {})  # type: ignore[arg-type]
    assert "those of qwen3-vl-8b" in str(other.why_not(packed["1x448"]))
    other.start()  # has nothing to start


def test_inputs_have_the_names_that_vllm_gives_them() -> None:
    packed = {"pixel_values": torch.ones(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    assert vllm_inputs("packed", packed) == packed
    tiles = vllm_inputs("tiles", {"pixel_values": torch.ones(3, 3, 4, 4), "num_patches": [1, 2]})
    assert tiles["image_num_patches"].tolist() == [1, 2]
    assert tiles["pixel_values_flat"].shape == (3, 3, 4, 4)


def test_a_variant_with_a_reference_of_its_own_is_compared_with_that() -> None:
    class Tower:
        seconds_to_settle = 0.0

        def __init__(self, error: float) -> None:
            self.error = error

        def prepare(self, batch: Any) -> None: ...

        def reference(self, batch: Any) -> torch.Tensor:
            return torch.ones(4, 2)

        def run(self, batch: Any) -> torch.Tensor:
            return torch.ones(4, 2) + self.error

        def padding(self, batch: Any) -> float:
            return 0.0

        def note(self, batch: Any) -> str:
            return ""

    job: Any = SimpleNamespace(dtype="float32", samples=2, quick=True, seconds=0.0)
    other = torch.full((4, 2), 7.0)
    row = _measure(job, Tower(0.0), [None], other)  # type: ignore[arg-type, list-item]
    assert row["error"] == 0.0 and row["p50"] >= 0
    assert "settled s" not in row
    assert "wrong" in _measure(job, Tower(0.5), [None], other)["failure"]  # type: ignore[arg-type, list-item]


def test_what_changes_how_it_runs_is_repeated_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    calls: list[int] = []
    settle([lambda: calls.append(1), lambda: calls.append(2)], 3.0)
    assert calls == [1, 2, 1, 2]  # the clock reads 0 for the end at 3, then 1, 2 and 3
    settle([lambda: calls.append(3)], 0.0)
    assert 3 not in calls
