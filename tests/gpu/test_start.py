"""A start from a file on a device: nothing is compiled, compared or timed, and the same is captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.attention.choice import KernelChooser, Measurements
from fxsplit_encoder.capture import ladder
from fxsplit_encoder.kernels import Meter
from fxsplit_encoder.manager import path as path_module

pytestmark = pytest.mark.gpu

CONFIG = fx.EncoderConfig(token_budgets=(64, 256, 1024), max_items_per_batch=4, max_frames_per_batch=4)


def manager_of(wrapped: Any) -> fx.EncoderCudaGraphManager:
    """One that knows nothing of attention, neither from this process nor from the disk."""
    manager = fx.EncoderCudaGraphManager(wrapped, CONFIG)
    manager.kernels.attention = KernelChooser(measurements=Measurements())
    return manager


def test_a_start_from_a_file_measures_nothing_and_captures_the_same(
    towers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = towers[2]
    first = manager_of(wrapped)
    first.capture()
    path = tmp_path / "a.start"
    first.save_start(path)

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured")

    for module, name in ((path_module, "measuring_forward"), (ladder, "measuring_run")):
        monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(Meter, "parts", fail)
    torch._dynamo.utils.counters.clear()
    second = manager_of(wrapped)
    assert second.load_start(path), second.reports
    second.capture()
    program = second.programs["default"].program
    inductor = torch._dynamo.utils.counters["inductor"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert (inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]) == (program.num_distinct, 0)
    old, new = first.paths["default"].ladder, second.paths["default"].ladder
    assert old.costs == new.costs and old.no_graph_needed == new.no_graph_needed
    assert {b: c.mode for b, c in old.captured.items()} == {b: c.mode for b, c in new.captured.items()}
    assert old.captured_single_segment.keys() == new.captured_single_segment.keys()
    side = 16
    pixels = torch.randn(side * side, wrapped.patch_features, device="cuda")
    request = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    assert str(first.plan(request)) == str(second.plan(request))
    # Inductor chooses anew between ways to add a row up where it loads a piece, so bits may differ.
    exact = towers[1](pixels, torch.tensor([[1, side, side]], device="cuda")).pooler_output
    found = [manager.execute(request)[0][:, : exact.shape[1]] for manager in (first, second)]
    errors = [float((each.float() - exact).norm() / exact.norm()) for each in found]
    assert errors[1] <= 1.05 * errors[0]
