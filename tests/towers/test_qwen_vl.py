"""Qwen2.5-VL's windows, which share the segments of a capture with frames."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ReplayError
from fxsplit_encoder.kernels.attention.builtin import PerSegment

from .dense_models import assert_close
from .random_weights import randomize
from .tiny_packed import PATCH, qwen2_5_vl

FEATURES = 3 * 2 * PATCH**2
CONFIG = {"mode": "full", "piece_compiler": "eager"}
sides = st.integers(1, 10).map(lambda n: 2 * n)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference() -> Any:
    """Hugging Face's tower, which nobody wrapped."""
    return randomize(qwen2_5_vl())


@pytest.fixture(scope="module")
def wrapped(reference: Any) -> Any:
    return fx.wrap(copy.deepcopy(reference))


@pytest.fixture(scope="module")
def manager(wrapped: Any) -> fx.EncoderCudaGraphManager:
    """In mode `full`, captured."""
    limits: dict[str, Any] = {"max_items_per_batch": 4, "max_frames_per_batch": 8}
    config = fx.EncoderConfig(token_budgets=(4, 16, 32, 64), **limits, **CONFIG)
    made = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
    made.capture()
    return made


def test_vllm_42787_windows_and_frames_share_a_budgets_segments(wrapped: Any, make_batch: Any) -> None:
    images = [(1, 2, 2), (1, 8, 8), (1, 24, 24), (1, 2, 34)]
    inputs = make_batch(images, [(5, 8, 8), (3, 12, 10)], features=FEATURES)
    assert wrapped.item_frames(inputs) == [1, 1, 1, 1, 5, 3]
    # 1, 1, 9, 5, 5 and 12 windows, of which 4 take a frame's place.
    assert wrapped.item_segments(inputs) == [1, 1, 3, 2, 5, 3]


@settings(max_examples=40)
@given(grids=st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=5))
def test_vllm_42796_a_capture_has_room_for_every_batch_that_is_planned_for_it(
    grids: list[Any], manager: Any, make_batch: Any
) -> None:
    inputs = make_batch(grids, features=FEATURES)
    for batch in manager.plan(inputs).batches:
        if (budget := batch.paths["default"].budget) is None:
            continue
        path = manager.paths["default"]
        values = path.values(manager.tower.select_encoder_cudagraph_items(inputs, list(batch.indices)))
        captured = path.best_capture(path.ladder, budget, values)
        for name in ("cu_seqlens", "cu_window_seqlens"):
            assert values[name].shape[0] <= captured.inputs.buffers[name].tensor.shape[0]


@torch.no_grad()
def test_narrow_images_take_a_larger_budget_or_the_exact_shape(
    manager: Any, reference: Any, make_batch: Any
) -> None:
    config = fx.EncoderConfig(token_budgets=(256, 512), max_items_per_batch=2, **CONFIG)
    wide = fx.EncoderCudaGraphManager(manager.tower, config, log_interval=0)
    wide.paths["default"].forward.bind(manager.programs["default"])
    wide.capture()
    # 14 and 16 windows of 196 and 250 tokens, 50 and 125 windows of 200 and 500.
    cases = (((1, 28, 28), 256), ((1, 20, 50), 256), ((1, 2, 400), 512), ((1, 2, 1000), None))
    for grid, budget in cases:
        inputs = make_batch([grid], features=FEATURES)
        (batch,) = wide.plan(inputs).batches
        assert batch.paths["default"].budget == budget
        expected = reference(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        assert_close(wide.execute(inputs), [expected])
    assert wide.stats().misses == {fx.MissReason.TOO_MANY_SEGMENTS: 1}


@torch.no_grad()
def test_at_the_exact_shape_each_attention_has_its_own_bound(
    manager: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = fx.EncoderCudaGraphManager(manager.tower, fx.EncoderConfig(mode="none"), log_interval=0)
    without.paths["default"].forward.bind(manager.programs["default"])
    without.capture()
    bounds = []
    original = PerSegment.__call__

    def attend(kernel: Any, q: Any, k: Any, v: Any, lengths: Any, bound: int, *rest: Any, **more: Any) -> Any:
        bounds.append((len(lengths) - 1, bound))
        return original(kernel, q, k, v, lengths, bound, *rest, **more)

    monkeypatch.setattr(PerSegment, "__call__", attend)
    without.execute(make_batch([(1, 12, 10), (1, 4, 6)], features=FEATURES))
    # 6 x 5 tokens are 4 windows, the largest of 4 x 4; 2 x 3 tokens are one.
    assert bounds == [(5, 64), (2, 120)]


def test_one_frame_alone_narrows_the_lengths_of_frames_only(manager: Any) -> None:
    program = manager.programs["default"]
    assert program.region.segment_inputs == ("cu_window_seqlens", "cu_seqlens")
    assert program.region.frame_lengths == "cu_seqlens"
    request = manager.paths["default"].ladder.request(16)
    before, after = (
        {name: buffer.tensor.shape[0] for name, buffer in each.inputs.buffers.items()}
        for each in (request, request.single_segment())
    )
    assert (before["cu_seqlens"], after["cu_seqlens"]) == (10, 2)
    assert {**before, "cu_seqlens": 2} == after


def test_an_order_that_reaches_into_pad_rows_is_not_replayed(manager: Any, make_batch: Any) -> None:
    path = manager.paths["default"]
    values = path.values(make_batch([(1, 4, 6)], features=FEATURES))
    captured = path.best_capture(path.ladder, 16, values)
    for name in ("window_permutation", "inverse_permutation"):
        with pytest.raises(ReplayError, match=f"{name}: got an order of 24 rows with entries from"):
            captured.inputs.buffers[name].check(values[name] + 1)
