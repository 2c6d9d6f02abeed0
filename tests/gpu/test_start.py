"""A second start on a device, from caches or a file: nothing is compiled, compared or timed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.capture import ladder
from fxsplit_encoder.kernels.meter import Meter
from fxsplit_encoder.manager import path as path_module

from .support import manager_of

pytestmark = pytest.mark.gpu

CONFIG = fx.EncoderConfig(token_budgets=(64, 256, 1024), max_items_per_batch=4, max_frames_per_batch=4)


def forbid_timing(monkeypatch: pytest.MonkeyPatch, *more: tuple[Any, str]) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured")

    for module, name in ((path_module, "measure_forward"), (ladder, "measure_run"), *more):
        monkeypatch.setattr(module, name, fail)


def test_the_next_start_takes_the_costs_of_the_last(
    towers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = manager_of(towers[2], CONFIG), manager_of(towers[2], CONFIG)
    first.capture()
    forbid_timing(monkeypatch)
    second.capture()
    old, new = first.paths["default"], second.paths["default"]
    assert old.costs == new.costs and old.ladder.no_graph_needed == new.ladder.no_graph_needed
    assert old.captured.keys() == new.captured.keys()


def test_a_start_from_a_file_measures_nothing_and_captures_the_same(
    towers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = towers[2]
    first = manager_of(wrapped, CONFIG)
    first.capture()
    path = tmp_path / "a.start"
    first.save_start(path)
    forbid_timing(monkeypatch, (Meter, "measure"))
    torch._dynamo.utils.counters.clear()
    second = manager_of(wrapped, CONFIG)
    assert second.load_start(path), second.reports
    second.capture()
    program = second.programs["default"].program
    inductor = torch._dynamo.utils.counters["inductor"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert (inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]) == (program.num_distinct, 0)
    old, new = first.paths["default"].ladder, second.paths["default"].ladder
    assert old.costs == new.costs and old.no_graph_needed == new.no_graph_needed
    made = [
        {budget: (each.mode, each.for_one_segment is None) for budget, each in ladder.captured.items()}
        for ladder in (old, new)
    ]
    assert made[0] == made[1]
    side = 16
    pixels = torch.randn(side * side, wrapped.patch_features, device="cuda")
    request = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    assert str(first.plan(request)) == str(second.plan(request))
    # Inductor chooses anew between ways to add a row up where it loads a piece, so bits may differ.
    exact = towers[1](pixels, torch.tensor([[1, side, side]], device="cuda")).pooler_output
    found = [manager.execute(request)[0][:, : exact.shape[1]] for manager in (first, second)]
    errors = [float((each.float() - exact).norm() / exact.norm()) for each in found]
    assert errors[1] <= 1.05 * errors[0]


def test_a_second_compile_traces_blocks_once_and_compiles_no_piece(towers: Any, inlined: list[int]) -> None:
    made = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        config = fx.EncoderConfig(
            mode="full", token_budgets=(64, 1024), max_items_per_batch=4, max_frames_per_batch=4
        )
        made.append(fx.EncoderCudaGraphManager(towers[2], config))
        made[-1].compile()
        assert not made[-1].reports
    program = made[-1].programs["default"].program
    inductor = torch._dynamo.utils.counters["inductor"]
    assert inductor["fxgraph_cache_hit"] == program.num_distinct
    assert inductor["fxgraph_cache_miss"] == 0
    assert inlined[0] == inlined[1] > 0
