"""Faults that other encoder CUDA graphs had, each as a test that would show it here.

A name holds the project and the number of its public issue or pull request: vllm is vllm-project/vllm, omni
vllm-project/vllm-omni, ascend vllm-project/vllm-ascend, sglang sgl-project/sglang, sglang_omni
sgl-project/sglang-omni, trtllm NVIDIA/TensorRT-LLM. A fault that one part alone keeps away is tested beside
that part, under the same kind of name.
`found` are faults that were found by reading those projects; no issue is known. What happens on a device is
played by the replay on a CPU, which runs the recorded calls over the same static buffers.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.attention.kernels import builtin
from fxsplit_encoder.capture import GraphPool, SegmentedCapture
from fxsplit_encoder.errors import InputError, ReplayError
from fxsplit_encoder.planning import CostModel, Item, PathCosts, build_plan
from fxsplit_encoder.planning.limits import resolve_limits
from fxsplit_encoder.protocol import EncoderCudaGraphConfig

from .mock_towers import (
    AxesModel,
    PackedModel,
    PathsModel,
    SplitModel,
    Values,
    alone,
    assert_equal_items,
    batch,
    eagerly,
    items,
)

NINE_BUDGETS = (1, 2, 4, 6, 8, 12, 16, 24, 32)


def captured(model: Any, **options: Any) -> fx.EncoderCudaGraphManager:
    defaults = {"mode": "full", "token_budgets": (4, 8, 16), "max_items_per_batch": 4, "debug": True}
    manager = fx.EncoderCudaGraphManager(model, fx.EncoderConfig(**{**defaults, **options}), log_interval=0)
    manager.capture()
    return manager


def leaky_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """As fast kernels do: rows outside of all segments stay as the memory was, here NaN, and are read."""
    segment = torch.searchsorted(lengths[1:].contiguous(), torch.arange(query.shape[0]), right=True)
    logits = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = logits.masked_fill(segment[:, None] != segment[None, :], float("-inf")).softmax(-1)
    out = torch.full_like(query, float("nan"))
    out[: lengths[-1]] = torch.einsum("hqk,khd->qhd", weights, value)[: lengths[-1]]
    return out


# --- vLLM


def test_vllm_57136_unwritten_pad_rows_of_nine_budgets_reach_nobody(
    make_manager: Any,
    make_batch: Any,
    encode: Any,
    tiny_towers: Any,
    monkeypatch: pytest.MonkeyPatch,
    poisoned_memory: None,
) -> None:
    monkeypatch.setattr(builtin, "_attend_by_segment", leaky_attention)
    manager = make_manager(mode="full", token_budgets=NINE_BUDGETS, max_items_per_batch=1)
    manager.capture()
    assert len(manager.budget_graphs["default"]) == 9
    for grid in ((1, 6, 6), (1, 2, 2), (1, 10, 10), (1, 2, 6)):
        inputs = make_batch([grid])
        assert_equal_items(manager.execute(inputs), encode(tiny_towers.reference, inputs))
    assert manager.stats().padding_fraction > 0
    assert manager.stats().hits == 4


def test_vllm_56922_only_rows_that_the_last_batch_filled_are_cleared() -> None:
    manager = captured(SplitModel(), token_budgets=(16,))
    buffer = manager.paths["default"].captured[16].inputs.buffers["patches"]
    manager.execute(batch(9))
    assert buffer.dirty_rows == 9
    buffer.tensor[12:] = 7.0  # nothing has filled them, so nothing clears them
    manager.execute(batch(3))
    assert buffer.dirty_rows == 3
    assert buffer.tensor[3:12].eq(0).all()
    assert buffer.tensor[12:].eq(7).all()


def test_vllm_52229_padding_has_a_price(make_manager: Any, make_batch: Any) -> None:
    manager = make_manager(mode="full", token_budgets=(4, 64))
    manager.capture()
    inputs = make_batch([(1, 2, 2), (1, 2, 4)])
    (planned,) = manager.plan(inputs).batches
    assert planned.paths["default"].budget == 4  # not the one that holds more
    # Six tokens would replay 64; the exact shape is measured to be faster.
    specs = manager.tower.get_encoder_cudagraph_item_specs(make_batch([(1, 4, 6)]))
    measured = PathCosts({4: 1.0, 64: 9.0}, exact=((1, 2.0), (64, 2.5)))
    plan = build_plan(list(map(Item, specs)), manager.limits, costs=CostModel({("default", ()): measured}))
    assert plan.misses == {fx.MissReason.EXACT_IS_FASTER: 1}


@pytest.mark.parametrize("budget_range", [(4096, 4096), (2049, 4096)])
def test_vllm_41714_a_narrow_range_does_not_make_batches_of_one(budget_range: tuple[int, int]) -> None:
    config = EncoderCudaGraphConfig(["image"], ["pixel_values"], 8)
    assert resolve_limits(fx.EncoderConfig(), config, budget_range, False).max_items_per_batch > 1


def test_omni_7650_vllm_43403_what_overflows_a_buffer_falls_back_whole() -> None:
    model = SplitModel()
    manager = captured(model, token_budgets=(8,))
    manager.execute(batch(3, 4))
    capture = manager.paths["default"].captured[8]
    before = {name: tensor.clone() for name, tensor in capture.inputs.tensors.items()}
    inputs = batch(1, 1, 1, 1)
    prepare = model.prepare_encoder_cudagraph_replay_buffers

    def oversize(mm_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Values:
        values = prepare(mm_kwargs, *args, **kwargs).values
        return Values({**values, "lengths": torch.tensor([0, *range(1, 12)], dtype=torch.int32)})

    model.prepare_encoder_cudagraph_replay_buffers = oversize
    model.encoder_eager_forward = lambda mm_kwargs, path="default": torch.full((4, 8), 5.0)
    manager.paths["default"].forward.program = None
    assert all(item.eq(5).all() for item in manager.execute(inputs))
    assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 4}
    assert all(torch.equal(tensor, before[name]) for name, tensor in capture.inputs.tensors.items())


def test_vllm_43403_a_missing_buffer_is_named() -> None:
    model = SplitModel()
    manager = captured(model)
    prepare = model.prepare_encoder_cudagraph_replay_buffers

    def incomplete(mm_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Values:
        values = prepare(mm_kwargs, *args, **kwargs).values
        return Values({name: value for name, value in values.items() if name != "divisor"})

    model.prepare_encoder_cudagraph_replay_buffers = incomplete
    with pytest.raises(ReplayError, match="divisor: the replay needs this buffer and got no value"):
        manager.execute(batch(3))


def test_vllm_40445_a_video_of_more_frames_than_the_limit_says_is_served(
    make_manager: Any, make_batch: Any, encode: Any, tiny_towers: Any
) -> None:
    manager = make_manager(mode="full", max_frames_per_batch=4)
    manager.capture()
    inputs = make_batch([(1, 2, 2)], [(5, 2, 2), (64, 2, 2)])
    assert_equal_items(manager.execute(inputs), encode(tiny_towers.reference, inputs))
    assert manager.stats().misses == {fx.MissReason.TOO_MANY_FRAMES: 2}


@pytest.mark.parametrize("key", ["image_embeds", "video_embeds"])
def test_vllm_58122_found_f_embeddings_are_refused_by_name(key: str, managers: Any) -> None:
    for inputs in ({key: torch.zeros(4, 96)}, {key: torch.zeros(4, 96), "image_grid_thw": [[1, 4, 4]]}):
        with pytest.raises(InputError, match=f"{key}: these are embeddings already"):
            managers["full"].execute(inputs)


def test_vllm_58122_budgets_below_one_image_are_left_out() -> None:
    class WholeImages(PathsModel):
        def prepare_encoder_cudagraph_capture_inputs(
            self, token_budget: int, *args: Any, **kwargs: Any
        ) -> Values:
            if token_budget < 8:
                raise ValueError("an image has eight tokens")
            return super().prepare_encoder_cudagraph_capture_inputs(token_budget, *args, **kwargs)

    model = WholeImages()
    manager = captured(model)
    assert {name: sorted(graphs) for name, graphs in manager.budget_graphs.items()} == {
        "global": [8, 16],
        "local": [8, 16],
    }
    inputs = items(model, (8, 0))
    assert_equal_items(manager.execute(inputs), eagerly(model, inputs))
    assert manager.stats().hits == 1


def test_vllm_49224_vllm_49233_captures_keep_the_byte_limit() -> None:
    whole = captured(PathsModel()).num_bytes
    manager = captured(PathsModel(), max_graph_bytes=whole * 2 // 3)
    assert 0 < manager.num_bytes <= whole * 2 // 3
    assert any("max_graph_bytes" in report for report in manager.reports)


def test_vllm_52509_vllm_57475_a_budget_that_runs_out_of_memory_costs_no_other() -> None:
    class Large(PathsModel):
        def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
            if path == "global" and len(inputs["patches"]) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.")
            return super().encoder_cudagraph_forward(inputs, path)

    model = Large()
    manager = captured(model)
    assert {name: sorted(graphs) for name, graphs in manager.budget_graphs.items()} == {
        "global": [4, 8],
        "local": [4, 8, 16],
    }
    assert any("memory" in report for report in manager.reports)
    inputs = items(model, (8, 16), (12, 2))
    assert_equal_items(manager.execute(inputs), eagerly(model, inputs))
    assert manager.stats().hits == 1


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


def test_vllm_52376_packing_in_another_order_keeps_items_apart() -> None:
    model = PathsModel()
    manager = captured(model)
    inputs = items(model, (9, 1), (1, 0), (16, 16), (2, 3), (4, 0), (3, 7))
    order = [index for planned in manager.plan(inputs).batches for index in planned.indices]
    assert order != sorted(order), "the request is meant to be packed in another order"
    assert_equal_items(manager.execute(inputs), eagerly(model, inputs))


@pytest.mark.parametrize("model_class", [PackedModel, SplitModel])
def test_vllm_40576_a_replay_equals_eager(model_class: Any) -> None:
    model = model_class()
    manager = captured(model)
    for lengths in ((3,), (2, 5), (1, 1, 1, 1), (8, 8)):
        inputs = batch(*lengths)
        assert_equal_items(manager.execute(inputs), alone(model, inputs))
    assert manager.stats().misses == {}


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


def test_omni_7659_graphs_that_no_item_reaches_are_not_captured() -> None:
    class Ranged(AxesModel):
        def get_encoder_cudagraph_item_token_range(self, path: str, axis_keys: Any) -> tuple[int, int]:
            return {4: (1, 2), 8: (9, 16)}[axis_keys[0]]

    manager = captured(Ranged(), max_items_per_batch=1)
    found = {(b, path.axis_keys) for path in manager.paths_by_key.values() for b in path.captured}
    assert found == {(4, (4, 1)), (4, (4, 2)), (16, (8, 1)), (16, (8, 2))}


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


def test_ascend_16794_outputs_and_inputs_of_captures_stay_alive() -> None:
    manager = captured(SplitModel())
    graphs = manager.budget_graphs["default"]
    addresses = {budget: graph.output_buffer.data_ptr() for budget, graph in graphs.items()}
    del graphs
    for n in range(1, 17):
        manager.execute(batch(n))
        torch.randn(n * 100)
    graphs = manager.budget_graphs["default"]
    assert {budget: graph.output_buffer.data_ptr() for budget, graph in graphs.items()} == addresses


# --- SGLang and TensorRT-LLM


def test_sglang_16902_sglang_37043_one_capture_serves_every_composition_of_a_batch(
    make_manager: Any, make_batch: Any, encode: Any, tiny_towers: Any
) -> None:
    manager = make_manager(mode="full", token_budgets=(16,))
    manager.capture()
    for images in ([(1, 8, 8)], [(1, 4, 8)] * 2, [(1, 4, 4)] * 4, [(1, 2, 2), (1, 10, 6)]):
        inputs = make_batch(images)
        assert_equal_items(manager.execute(inputs), encode(tiny_towers.reference, inputs))
    assert manager.stats().misses == {}
    assert list(manager.budget_graphs["default"]) == [16]


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
        inputs = batch(*lengths)
        assert_equal_items(manager.execute(inputs), alone(model, inputs))
    assert manager.stats().misses == {}
    assert compiled_inside, "the eager forward compiles it"
    assert not any(compiled_inside)


def test_sglang_29216_what_a_capture_reads_is_watched() -> None:
    model = SplitModel()
    manager = captured(model)
    manager.execute(batch(3))
    model.linear.weight = torch.nn.Parameter(2 * model.linear.weight, requires_grad=False)
    with pytest.raises(ReplayError, match=r"linear\.weight: moved since the capture"):
        next(iter(manager.paths["default"].captured.values())).replay()
    assert_equal_items(manager.execute(batch(3)), alone(model, batch(3)))  # captured again


def test_sglang_27343_poisoned_memory_behind_a_batch_reaches_nobody(poisoned_memory: None) -> None:
    model = SplitModel()
    manager = captured(model, token_budgets=(16,))
    for lengths in ((3,), (5, 7), (1,)):
        inputs = batch(*lengths)
        output = manager.execute(inputs)
        assert all(item.isfinite().all() for item in output)
        assert_equal_items(output, alone(model, inputs))


def test_sglang_cached_embeddings_survive_the_next_replay_of_the_same_budget() -> None:
    model = SplitModel()
    manager = captured(model, token_budgets=(8,))
    (first,) = manager.execute(batch(8))
    kept = first.clone()
    manager.execute({**batch(8), "patches": torch.full((8, 8), 3.0)})
    assert torch.equal(first, kept)
    assert first.untyped_storage().nbytes() == first.nbytes


def test_trtllm_14829_trtllm_17030_a_batch_need_not_have_as_many_items_as_the_capture() -> None:
    model = SplitModel()
    manager = captured(model, token_budgets=(8,))
    for lengths in ((8,), (4, 4), (2, 2, 2), (1, 1, 1, 1)):
        inputs = batch(*lengths)
        assert_equal_items(manager.execute(inputs), alone(model, inputs))
    assert manager.stats().hits == 10


def test_trtllm_skewed_lengths_after_even_ones_are_not_frozen() -> None:
    model = SplitModel()
    manager = captured(model, token_budgets=(16,))
    for lengths in ((8, 8), (15, 1), (1, 15), (16,)):
        inputs = batch(*lengths)
        assert_equal_items(manager.execute(inputs), alone(model, inputs))


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


def test_found_c_an_image_after_a_video_has_rising_lengths(
    make_manager: Any, make_batch: Any, encode: Any, tiny_towers: Any
) -> None:
    manager = make_manager(mode="full", token_budgets=(32,))
    manager.capture()
    for inputs in (
        make_batch([], [(8, 4, 4)]),
        make_batch([(1, 2, 4)]),
        make_batch([(1, 2, 2)], [(3, 4, 4)]),
    ):
        assert_equal_items(manager.execute(inputs), encode(tiny_towers.reference, inputs))
        capture = manager.paths["default"].captured[32]
        lengths = capture.inputs.tensors["cu_seqlens"].tolist()
        assert all(a <= b for a, b in itertools.pairwise(lengths))
        assert lengths[-1] <= 4 * 32
    assert manager.stats().misses == {}


def test_found_d_nothing_is_captured_for_no_modality() -> None:
    class Nothing(PathsModel):
        def get_encoder_cudagraph_config(self) -> Any:
            config = super().get_encoder_cudagraph_config()
            config.modalities = []
            return config

    model = Nothing()
    manager = captured(model)
    assert not any(path.captured for path in manager.paths_by_key.values())
    assert manager.num_bytes == 0
    inputs = items(model, (3, 2))
    assert_equal_items(manager.execute(inputs), eagerly(model, inputs))
    assert manager.stats().misses == {fx.MissReason.UNSUPPORTED_INPUT: 1}


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


def test_found_h_an_item_that_is_part_hit_part_miss_is_one_miss() -> None:
    model = PathsModel()
    manager = captured(model)
    manager.execute(items(model, (3, 17)))
    stats = manager.stats()
    assert (stats.items, stats.hits, stats.misses) == (1, 0, {fx.MissReason.OVER_LARGEST_BUDGET: 1})
    manager.execute(items(model, (3, 2)))
    assert (manager.stats().items, manager.stats().hits, manager.stats().hit_rate) == (2, 1, 0.5)


def test_found_i_every_budget_is_captured_once() -> None:
    manager = fx.EncoderCudaGraphManager(
        PathsModel(), fx.EncoderConfig(mode="full", token_budgets=(4, 8), max_items_per_batch=2)
    )
    recorded: list[tuple[str, int]] = []
    for path in manager.paths_by_key.values():
        request = path.ladder._request
        path.ladder._request = lambda budget, path=path, request=request: (
            recorded.append((path.name, budget)),
            request(budget),
        )[1]
    manager.planned_captures()
    manager.capture()
    manager.capture()
    assert sorted(recorded) == [("global", 4), ("global", 8), ("local", 4), ("local", 8)]
