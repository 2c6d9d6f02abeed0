"""`mode: breakable` in the manager: budgets of the untouched tower, without a compiler."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.planning.limits import CaptureKey

from . import managers

captured = functools.partial(managers.captured, token_budgets=(4, 16, 32, 64), max_frames_per_batch=8)
BATCHES = (
    ([(1, 8, 8)], []),
    ([(1, 4, 6), (1, 2, 2), (1, 12, 10)], []),
    ([], [(3, 4, 8)]),
    ([(1, 4, 4)], [(2, 4, 4), (1, 8, 8)]),
    ([(1, 2, 2)], []),
)


@pytest.fixture(scope="module")
def breakable(tiny_towers: Any) -> fx.EncoderCudaGraphManager:
    return captured(tiny_towers.wrapped, mode="breakable")


def test_nothing_is_compiled_and_attention_breaks(breakable: Any, tiny_towers: Any) -> None:
    assert breakable.programs == {"default": None}
    assert breakable.reports == []
    layers = len(tiny_towers.hugging_face.blocks)
    for graph in breakable.budget_graphs["default"].values():
        assert graph.mode == "breakable"
        assert graph.graph.num_eager_breaks == layers
        assert graph.graph.num_graphs == layers + 1
        assert len(graph.graph.segments) == 2 * layers + 1


def test_pixels_left_by_a_larger_batch_do_not_reach_a_smaller_one(
    breakable: Any, make_batch: Any, assert_as_eager: Any
) -> None:
    large, small = make_batch([(1, 16, 16)], seed=1), make_batch([(1, 14, 12)], seed=2)
    large["pixel_values"] = large["pixel_values"] * torch.nan
    breakable.execute(large)
    assert_as_eager(breakable, small)


def test_a_tower_that_does_not_compile_gets_graphs(
    make_batch: Any, tiny_towers: Any, monkeypatch: pytest.MonkeyPatch, assert_as_eager: Any
) -> None:
    def refuse(*args: Any) -> None:
        raise fx.errors.CompileError("no graph for this one")

    monkeypatch.setattr("fxsplit_encoder.compile.trace.trace_forward", refuse)
    for mode, made in (("auto", "full"), ("full", "full"), ("piecewise", "breakable")):
        manager = captured(tiny_towers.wrapped, mode=mode)
        assert any("no graph for this one" in report for report in manager.reports)
        assert {graph.mode for graph in manager.budget_graphs["default"].values()} == {made}
        for images, videos in BATCHES:
            inputs = make_batch(images, videos)
            assert_as_eager(manager, inputs)
        assert manager.stats().hit_rate == 1


class ReadsValues(nn.Module):
    """Around a tower: its forward reads a value on the host, in the open or in a break."""

    def __init__(self, tower: Any, read: Any) -> None:
        super().__init__()
        self.tower = tower
        self.read = read

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("tower"), name)

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        output = self.tower.encoder_cudagraph_forward(inputs, path=path)
        return output * self.read(output)


def read(output: Tensor) -> Tensor:
    return torch.full((), 1.0 if output.isfinite().all().item() else 2.0)


@pytest.mark.slow
def test_what_cannot_be_captured_names_the_op_and_the_rest_serves(
    make_batch: Any, tiny_towers: Any, assert_as_eager: Any
) -> None:
    inputs = make_batch([(1, 8, 8)])
    manager = captured(ReadsValues(tiny_towers.wrapped, read), mode="breakable")
    assert not manager.budget_graphs["default"]
    assert any("_local_scalar_dense" in report for report in manager.reports)
    assert_as_eager(manager, inputs)
    assert manager.stats().misses == {fx.MissReason.NOT_CAPTURED: 1}

    breaking = fx.eager_break_during_capture(read)
    manager = captured(ReadsValues(tiny_towers.wrapped, breaking), mode="breakable")
    assert manager.reports == []
    assert_as_eager(manager, inputs)
    assert manager.stats().hit_rate == 1
    # In one graph it cannot be: the budget is captured in the mode that can.
    manager = captured(ReadsValues(tiny_towers.wrapped, breaking), mode="full")
    graphs = manager.budget_graphs["default"]
    assert {graph.mode for graph in graphs.values()} == {"breakable"}
    assert any("captured in mode breakable: in mode full" in report for report in manager.reports)
    assert_as_eager(manager, inputs)


def test_a_debugged_replay_sees_that_an_output_was_handed_out(breakable: Any, make_batch: Any) -> None:
    inputs = make_batch([(1, 8, 8)])
    breakable.execute(inputs)
    capture = breakable.paths["default"].captured[16]
    breakable.pool.handed_out.add([capture.outputs[0]])
    with pytest.raises(fx.ReplayError, match="capture rule 7"):
        breakable.execute(inputs)
    breakable.clear()
    assert CaptureKey("default", 16) in breakable.stats().budgets
