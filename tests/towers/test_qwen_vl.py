from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ReplayError
from fxsplit_encoder.kernels.attention.builtin import PerSegment

from .packed_tower_tests import Grid, PackedModuleTests, Towers, assert_equal, make_batch
from .tiny_packed import qwen2_5_vl, qwen2_vl, qwen3_5

sides = st.integers(1, 10).map(lambda n: 2 * n)


class TestQwen2VL(PackedModuleTests):
    metadata: ClassVar[list[str]] = ["position_ids", "cu_seqlens"]

    @classmethod
    def make_tower(cls) -> nn.Module:
        return qwen2_vl(blocks=3)


@pytest.mark.slow
class TestQwen25VL(PackedModuleTests):
    metadata: ClassVar[list[str]] = [
        "position_ids",
        "window_permutation",
        "inverse_permutation",
        "cu_window_seqlens",
        "cu_seqlens",
    ]

    @classmethod
    def make_tower(cls) -> nn.Module:
        return qwen2_5_vl(blocks=2)

    @pytest.fixture(scope="class")
    @classmethod
    def manager(cls, towers: Towers) -> fx.EncoderCudaGraphManager:
        """In mode `full`, captured."""
        config = fx.EncoderConfig(
            mode="full", token_budgets=(4, 16, 32, 64), max_items_per_batch=4, max_frames_per_batch=8
        )
        made = fx.EncoderCudaGraphManager(towers.wrapped, config, log_interval=0)
        made.capture()
        return made

    def test_vllm_42787_windows_and_frames_share_a_budgets_segments(self, towers: Towers) -> None:
        wrapped = towers.wrapped
        inputs = make_batch([(1, 2, 2), (1, 8, 8), (1, 24, 24), (1, 2, 34)], [(5, 8, 8), (3, 12, 10)])
        assert wrapped.item_frames(inputs) == [1, 1, 1, 1, 5, 3]
        # 1, 1, 9, 5, 5 and 12 windows, of which 4 take a frame's place.
        assert wrapped.item_segments(inputs) == [1, 1, 3, 2, 5, 3]

    @settings(max_examples=40)
    @given(grids=st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=5))
    def test_vllm_42796_a_capture_has_room_for_every_batch_that_is_planned_for_it(
        self, grids: list[Grid], manager: Any, towers: Towers
    ) -> None:
        inputs = make_batch(grids)
        for batch in manager.plan(inputs).batches:
            budget = batch.paths["default"].budget
            if budget is None:
                continue
            selected = towers.wrapped.select_encoder_cudagraph_items(inputs, list(batch.indices))
            path = manager.paths["default"]
            values = path.values(selected)
            captured = path.best_capture(path.ladder, budget, values)
            for name in ("cu_seqlens", "cu_window_seqlens"):
                assert values[name].shape[0] <= captured.inputs.buffers[name].tensor.shape[0]

    @torch.no_grad()
    def test_narrow_images_take_a_larger_budget_or_the_exact_shape(
        self, manager: Any, towers: Towers
    ) -> None:
        config = fx.EncoderConfig(mode="full", token_budgets=(256, 512), max_items_per_batch=2)
        wide = fx.EncoderCudaGraphManager(towers.wrapped, config, log_interval=0)
        wide.paths["default"].forward.bind(manager.programs["default"])
        wide.capture()
        # 14 and 16 windows of 196 and 250 tokens, 50 and 125 windows of 200 and 500.
        for grid, budget in (
            ((1, 28, 28), 256),
            ((1, 20, 50), 256),
            ((1, 2, 400), 512),
            ((1, 2, 1000), None),
        ):
            inputs = make_batch([grid])
            (batch,) = wide.plan(inputs).batches
            assert batch.paths["default"].budget == budget
            assert_equal(wide.execute(inputs), self.encode(towers.reference, inputs))
        assert wide.stats().misses == {fx.MissReason.TOO_MANY_SEGMENTS: 1}

    @torch.no_grad()
    def test_at_the_exact_shape_each_attention_has_its_own_bound(
        self, manager: Any, towers: Towers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without = fx.EncoderCudaGraphManager(towers.wrapped, fx.EncoderConfig(mode="none"), log_interval=0)
        without.paths["default"].forward.bind(manager.programs["default"])
        without.capture()
        bounds = []
        original = PerSegment._attend

        def attend(kernel: Any, q: Any, k: Any, v: Any, lengths: Any, bound: int, *rest: Any) -> Any:
            bounds.append((len(lengths) - 1, bound))
            return original(kernel, q, k, v, lengths, bound, *rest)

        monkeypatch.setattr(PerSegment, "_attend", attend)
        inputs = make_batch([(1, 12, 10), (1, 4, 6)])
        without.execute(inputs)
        # 6 x 5 tokens are 4 windows, the largest of 4 x 4; 2 x 3 tokens are one.
        assert bounds == [(5, 64), (2, 120)]

    def test_one_frame_alone_narrows_the_lengths_of_frames_only(self, manager: Any) -> None:
        program = manager.programs["default"]
        assert program.region.segment_inputs == ("cu_window_seqlens", "cu_seqlens")
        assert program.region.frame_lengths == "cu_seqlens"
        request = manager.paths["default"].ladder.request(16)
        single = request.single_segment()
        before, after = (
            {name: buffer.tensor.shape[0] for name, buffer in r.inputs.buffers.items()}
            for r in (request, single)
        )
        assert (before["cu_seqlens"], after["cu_seqlens"]) == (10, 2)
        assert {**before, "cu_seqlens": 2} == after

    def test_an_order_that_reaches_into_pad_rows_is_not_replayed(self, manager: Any) -> None:
        path = manager.paths["default"]
        values = path.values(make_batch([(1, 4, 6)]))
        captured = path.best_capture(path.ladder, 16, values)
        for name in ("window_permutation", "inverse_permutation"):
            with pytest.raises(ReplayError, match=f"{name}: got an order of 24 rows with entries from"):
                captured.inputs.buffers[name].check(values[name] + 1)


class TestQwen35(PackedModuleTests):
    metadata: ClassVar[list[str]] = ["position_ids", "interp_indices", "interp_weights", "cu_seqlens"]

    @classmethod
    def make_tower(cls) -> nn.Module:
        return qwen3_5(blocks=3)


class TestQwen35Moe(TestQwen35):
    @classmethod
    def make_tower(cls) -> nn.Module:
        return qwen3_5(blocks=3, moe=True)
