"""Faults that other encoder CUDA graphs had, each as a test that would show it here.

A name holds the project and the number of its public issue or pull request: vllm is vllm-project/vllm, omni
vllm-project/vllm-omni, ascend vllm-project/vllm-ascend, sglang sgl-project/sglang, sglang_omni
sgl-project/sglang-omni, trtllm NVIDIA/TensorRT-LLM. A fault that one part alone keeps away is tested beside
that part, under the same kind of name.
`found` are faults that were found by reading those projects; no issue is known. What happens on a device is
played by the replay on a CPU, which runs the recorded calls over the same static buffers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.capture.breakable import SegmentedCapture
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import CostModel, PathCosts
from fxsplit_encoder.planning.plan import Item
from fxsplit_encoder.planning.planner import build_plan

from .managers import captured
from .mock_towers import PathsModel, SplitModel, assert_serves, batch, items

pytestmark = pytest.mark.usefixtures("traced_once")


# --- vLLM


def test_vllm_52229_padding_has_a_price(make_captured: Any, make_batch: Any) -> None:
    manager = make_captured(mode="full", token_budgets=(4, 64))
    inputs = make_batch([(1, 2, 2), (1, 2, 4)])
    (planned,) = manager.plan(inputs).batches
    assert planned.paths["default"].budget == 4  # not the one that holds more
    # Six tokens would replay 64; the exact shape is measured to be faster.
    specs = manager.tower.get_encoder_cudagraph_item_specs(make_batch([(1, 4, 6)]))
    measured = PathCosts({4: 1.0, 64: 9.0}, exact=((1, 2.0), (64, 2.5)))
    plan = build_plan(list(map(Item, specs)), manager.limits, costs=CostModel({("default", ()): measured}))
    assert plan.misses == {fx.MissReason.EXACT_IS_FASTER: 1}


@pytest.mark.parametrize("key", ["image_embeds", "video_embeds"])
def test_vllm_58122_found_f_embeddings_are_refused_by_name(key: str, managers: Any) -> None:
    for inputs in ({key: torch.zeros(4, 96)}, {key: torch.zeros(4, 96), "image_grid_thw": [[1, 4, 4]]}):
        with pytest.raises(InputError, match=f"{key}: these are embeddings already"):
            managers["full"].execute(inputs)


def test_vllm_51461_every_path_gives_the_tower_a_tensor_by_name() -> None:
    seen: list[dict[str, type]] = []

    class Watching(PathsModel):
        def postprocess_encoder_output(self, outputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
            seen.append({path: type(output) for path, output in outputs.items()})
            super().postprocess_encoder_output(outputs, *args, **kwargs)

    model = Watching()
    manager = captured(model)
    for sizes in ([(3, 2)], [(3, 0)], [(17, 2)]):
        manager.execute(items(model, *sizes))
    assert seen == [
        {"global": Tensor, "local": Tensor},
        {"global": Tensor},
        {"global": Tensor, "local": Tensor},
    ]


def test_vllm_52115_an_item_of_one_path_is_no_view_of_its_output() -> None:
    model = PathsModel()
    manager = captured(model)
    first_inputs, second_inputs = items(model, (3, 0), seed=1), items(model, (4, 0), seed=2)
    (first,) = manager.execute(first_inputs)
    kept = first.clone()
    outputs = [g.output_buffer for graphs in manager.budget_graphs.values() for g in graphs.values()]
    assert all(first.untyped_storage().data_ptr() != o.untyped_storage().data_ptr() for o in outputs)
    manager.execute(second_inputs)
    assert torch.equal(first, kept)


def test_omni_7659_items_are_parsed_once_a_request() -> None:
    class Counting(PathsModel):
        parsed = 0

        def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
            self.parsed += 1
            return super().get_encoder_cudagraph_item_specs(mm_kwargs)

    model = Counting()
    manager = captured(model)
    manager.execute(items(model, (9, 1), (16, 2), (12, 0)))
    assert sum(stats.replays for stats in manager.stats().budgets.values()) > 2
    assert model.parsed == 1


def test_omni_6587_memory_is_given_back_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = captured(PathsModel())
    captures = [c for path in manager.paths.values() for c in path.captured.values()]
    held: list[int] = []
    retire = GraphPool.retire

    def spy(pool: GraphPool) -> None:
        held.append(sum(bool(capture.outputs) for capture in captures))
        retire(pool)

    monkeypatch.setattr(GraphPool, "retire", spy)
    manager.clear()
    assert held == [0]  # once, after every capture was released


# --- SGLang and TensorRT-LLM


def test_sglang_17871_sglang_19490_what_a_tower_compiles_itself_is_not_compiled_inside_a_capture(
    monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> None:
    inside: list[SegmentedCapture] = []
    compiled_inside: list[bool] = []
    enter, leave = SegmentedCapture.__enter__, SegmentedCapture.__exit__
    monkeypatch.setattr(SegmentedCapture, "__enter__", lambda self: (inside.append(self), enter(self))[1])
    monkeypatch.setattr(SegmentedCapture, "__exit__", lambda self, *e: (inside.pop(), leave(self, *e))[1])

    def lazy(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled_inside.append(bool(inside))
        return graph

    rotate = torch.compile(lambda x: x.flip(-1) * 2, backend=lazy)

    class CompiledRotary(SplitModel):
        def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
            return super().encoder_cudagraph_forward({**inputs, "patches": rotate(inputs["patches"])}, path)

    model = CompiledRotary()
    manager = captured(model)
    assert len(manager.budget_graphs["default"]) == 3
    for lengths in ((3,), (2, 5), (8, 8)):
        assert_serves(manager, batch(*lengths))
    assert manager.stats().misses == {}
    assert compiled_inside, "the eager forward compiles it"
    assert not any(compiled_inside)


# --- found by reading


@pytest.mark.parametrize("max_frames", [1, 64, 38_400])
def test_found_a_found_b_small_budgets_stay_small_with_video(tiny_towers: Any, max_frames: int) -> None:
    settings = fx.EncoderConfig(
        mode="full", token_budgets=(64, 512), max_items_per_batch=64, max_frames_per_batch=max_frames
    )
    manager = fx.EncoderCudaGraphManager(tiny_towers.wrapped, settings)
    for capture in manager.planned_captures().captures:
        made = manager.paths["default"].forward.capture_values(capture.key.budget)
        assert made["pixel_values"].shape[0] == 4 * capture.key.budget
    small, large = manager.planned_captures().captures
    assert small.input_bytes < large.input_bytes / 7


def test_found_e_pixels_are_not_joined_before_they_are_copied(managers: Any, make_batch: Any) -> None:
    inputs = make_batch([(1, 4, 4), (1, 16, 16), (1, 2, 4)])
    tower = managers["full"].tower
    selected = tower.select_encoder_cudagraph_items(inputs, [0, 2])
    (first, second) = tower.prepare_encoder_cudagraph_replay_buffers(selected, 4, 0).values["pixel_values"]
    storage = inputs["pixel_values"].untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() == storage


def test_found_g_no_items_run_nothing() -> None:
    class NoEmptySelection(PathsModel):
        def select_encoder_cudagraph_items(
            self, mm_kwargs: dict[str, Any], indices: list[int]
        ) -> dict[str, Any]:
            assert indices, "this tower cannot select nothing"
            return super().select_encoder_cudagraph_items(mm_kwargs, indices)

    model = NoEmptySelection()
    manager = captured(model)
    model.runs.clear()
    assert manager.execute(items(model)) == []
    assert not model.runs
    assert manager.stats().items == 0
