"""GPU tests: the true Qwen3-VL-8B width in bfloat16, fewer blocks. Skipped without CUDA."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx


@pytest.fixture(scope="session", autouse=True)
def needs_cuda() -> None:
    """Before any fixture of a module."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def two_devices(needs_cuda: None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.fixture
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of the models' own would round to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="session")
def towers(needs_cuda: None) -> Any:
    """(Hugging Face tower in bfloat16, the same in float32, a wrapped copy)."""
    from fxsplit_encoder.models.random import demo_tower

    eager = demo_tower(6, "cuda", torch.bfloat16)
    return eager, copy.deepcopy(eager).float(), fx.wrap(copy.deepcopy(eager))


@pytest.fixture(scope="session")
def managers(towers: Any) -> Iterator[dict[str, fx.EncoderCudaGraphManager]]:
    """A captured manager for each mode."""
    made = {}
    for mode in ("full", "piecewise", "none", "auto"):
        config = fx.EncoderConfig(
            mode=mode,
            # What fits a budget is replayed, whatever it costs, but where `auto` is asked to choose.
            packing="cost" if mode == "auto" else "greedy",
            token_budgets=(16, 64, 256, 512, 1024),
            max_items_per_batch=8,
            max_frames_per_batch=16,
            debug=True,
        )
        made[mode] = fx.EncoderCudaGraphManager(towers[2], config)
        made[mode].capture()
    yield made
    for manager in made.values():
        manager.clear()
