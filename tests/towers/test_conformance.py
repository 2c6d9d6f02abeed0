"""What every registered tower must do: a class is tested by being registered.

Towers are those of `tiny_towers.TINY`, in mode `full`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import fxsplit_encoder as fx
from fxsplit_encoder.capture.buffers import parts_of
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.compile import saved
from fxsplit_encoder.compile.saved import restore_program
from fxsplit_encoder.errors import ReplayError
from fxsplit_encoder.kernels.attention.builtin import PerSegment
from fxsplit_encoder.manager.tower import named_tensors
from fxsplit_encoder.protocol import missing_methods

from .conformance import FRAMES, ITEMS, Case, assert_compiled_once, assert_modes_agree, make_case
from .dense_models import encoded
from .tiny_inputs import items
from .tiny_towers import TINY

NAMES = fx.supported_towers()
CPU = torch.device("cpu")


# A tower of each kind: packed patches, tiles, two views. The others take the same steps, and longer.
QUICK = ("InternVLModel", "Qwen3VLVisionModel", "Step3VisionModel")

# One with two kinds of segments, and one with two views; test_dense.py has tiles.
COMPILED = ("Qwen2_5_VisionTransformerPretrainedModel", "Step3VisionModel")

# The code of another class under another name, with or without the projector behind it, or without features
# of early blocks: they are traced to what that one is traced to, which takes seconds. What needs no trace is
# tested of each.
TWINS = (
    "Glm4vMoeVisionModel",
    "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen2_5OmniVisionEncoder",
    "Qwen3VLMoeVisionModel",
    "Qwen3_5MoeVisionModel",
    "Qwen3_5VisionModel",
    "Step3p7VisionModel",
)


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Of a test that captures this tower."""
    if name in TWINS:
        return [pytest.mark.slow, pytest.mark.exhaustive]
    return [] if name in QUICK else [pytest.mark.slow]


each_tower = pytest.mark.parametrize("case", NAMES, indirect=True, scope="module")
each_captured = pytest.mark.parametrize(
    "case", [pytest.param(name, marks=marks(name)) for name in NAMES], indirect=True, scope="module"
)
each_compiled = pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in COMPILED else pytest.mark.exhaustive) for name in NAMES],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def test_only_registered_classes_are_in_the_table() -> None:
    assert sorted(TINY) == NAMES


# --- compiled and captured


@each_captured
def test_padding_is_proved_and_every_budget_is_captured(case: Case) -> None:
    for path, budgets in case.inputs.budgets.items():
        program = case.manager.programs[path]
        assert program is not None, case.manager.reports
        assert program.program.padding.proved, program.program.padding
        assert program.program.splits, "nothing tells where tokens attend"
        graphs = [getattr(step.call, "__self__").graph for step in program.program.pieces]  # noqa: B009
        targets = [str(node.target) for graph in graphs for node in graph.nodes]
        assert not [target for target in targets if "complex" in target], "Inductor takes no complex numbers"
        assert not [t for t in program.fixed if isinstance(t, torch.Tensor) and t.is_complex()]
        assert tuple(case.manager.budget_graphs[path]) == budgets
    assert case.manager.reports == []


@each_captured
def test_every_mode_makes_the_same_items(case: Case) -> None:
    assert_modes_agree(case)


@each_captured
def test_memory_that_nobody_wrote_does_not_matter(case: Case, poisoned_memory: None) -> None:
    for mode in ("full", "piecewise"):
        assert case.misses_of([*case.images, *case.videos], mode) == {}


@each_compiled
@pytest.mark.slow
def test_torch_compile_traces_each_view_once(case: Case) -> None:
    assert_compiled_once(case)


@each_captured
def test_its_programs_are_saved_and_restored(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in case.manager.paths_by_key.values():
        assert path.program is not None
        pieces = {str(step.distinct): step.call for step in path.program.program.pieces}
        with monkeypatch.context() as patch:  # in place of Inductor's cache
            patch.setattr(saved, "_key_of", lambda step: (str(step.distinct), ""))
            patch.setattr(saved, "_load_piece", lambda key, guards, known=pieces: known[key])
            content = saved.save_program(path.program, named_tensors(path.tower))
            restored = restore_program(content, named_tensors(case.manager.tower), CPU)
        for budget in path.budgets[:2]:
            values = path.capture_values(budget)
            torch.testing.assert_close(restored(values), path.program(values), rtol=0, atol=0)
            symbols = path.program.symbols(values)
            assert restored.symbols(values) == symbols
            assert restored.program.may_be_captured(symbols) == path.program.program.may_be_captured(symbols)


# --- the protocol


@each_tower
def test_what_a_tower_says_of_itself(case: Case) -> None:
    tower, inputs = case.tower, case.inputs
    assert isinstance(tower, nn.Module)
    assert isinstance(tower, fx.SupportsEncoderCudaGraph)
    assert missing_methods(tower) == []
    config = tower.get_encoder_cudagraph_config()
    assert type(config) is fx.EncoderCudaGraphConfig
    assert config.modalities == ["image", *(["video"] if inputs.videos else [])]
    assert list(config.paths) == list(inputs.budgets)
    assert all(type(path) is fx.EncoderCudaGraphPathConfig for path in config.paths.values())
    assert type(tower.get_max_frames_per_video()) is int
    assert tower.get_max_frames_per_video() == config.max_frames_per_video >= 1
    low, high = tower.get_encoder_cudagraph_budget_range(None)
    assert (type(low), type(high)) == (int, int)
    assert 0 < low <= high
    for batch in (case.images, case.videos):
        if batch:
            assert tower.get_input_modality(inputs.make(batch)) == batch[0].modality
    assert (tower.device, tower.dtype) == (CPU, torch.float32)
    with pytest.raises(AttributeError):
        tower.no_such_attribute  # noqa: B018
    assert tower.config is tower.tower.config
    rows = low if isinstance(tower, fx.PackedTower) else 1
    outputs = [each for each in tree_leaves(tower(*tower.example_inputs())) if each is not None]
    assert all(each.isfinite().all() for each in outputs)
    assert rows in {len(each) for each in outputs}


@each_tower
def test_a_capture_owns_its_inputs(case: Case) -> None:
    """A replay writes to them; metadata of the same size, which are cached, must not change with them."""

    def made() -> dict[str, torch.Tensor]:
        return {
            f"{path} {name}": value
            for path, budgets in case.inputs.budgets.items()
            for name, value in case.tower.prepare_encoder_cudagraph_capture_inputs(
                budgets[-1], ITEMS, FRAMES, CPU, torch.float32, path=path
            ).values.items()
        }

    first, second = made(), made()
    expected = {name: value.clone() for name, value in second.items()}
    for value in first.values():
        value.fill_(99)
    for name, value in made().items():
        assert torch.equal(second[name], expected[name])
        assert torch.equal(value, expected[name]), name


@each_tower
def test_captures_and_replays_name_the_same_tensors(case: Case) -> None:
    tower, inputs = case.tower, case.inputs
    batch = inputs.make([*case.images, *case.videos])
    names = set()
    for path, budgets in inputs.budgets.items():
        captured = tower.prepare_encoder_cudagraph_capture_inputs(
            budgets[-1], ITEMS, FRAMES, torch.device("meta"), torch.bfloat16, path=path
        )
        replayed = tower.prepare_encoder_cudagraph_replay_buffers(batch, ITEMS, FRAMES, path=path)
        assert type(captured) is fx.EncoderCudaGraphCaptureInputs
        assert type(replayed) is fx.EncoderCudaGraphReplayBuffers
        assert list(captured.values) == list(replayed.values)
        names |= set(captured.values)
        floats = 0
        for name, buffer in captured.values.items():
            value = torch.cat(list(parts_of(replayed.values[name])))
            assert buffer.is_meta
            assert value.device == CPU
            assert value.shape[0] <= buffer.shape[0], name
            assert value.shape[1:] == buffer.shape[1:], name
            if buffer.dtype == torch.bfloat16:
                floats += 1
                assert value.dtype == torch.float32
            else:
                assert value.dtype == buffer.dtype, name
        assert floats == 1, "the pixels, and only they, are in the tower's dtype"
    assert names == set(tower.get_encoder_cudagraph_config().buffer_keys)


@each_tower
def test_found_e_pixels_are_not_joined_before_they_are_copied(case: Case) -> None:
    """A selection, in whatever order, is made of views of what the caller gave."""
    tower, inputs = case.tower, case.inputs
    batch, images = [*case.images, *case.videos], len(case.images)
    order = [*reversed(range(images)), *reversed(range(images, len(batch)))]
    made = inputs.make(batch)
    given = {part.untyped_storage().data_ptr() for value in made.values() for part in parts_of(value)}
    selected = tower.select_encoder_cudagraph_items(made, order)
    straight = inputs.make([batch[index] for index in order])
    for path, budgets in inputs.budgets.items():
        captured = tower.prepare_encoder_cudagraph_capture_inputs(
            budgets[-1], ITEMS, FRAMES, torch.device("meta"), torch.bfloat16, path=path
        )
        (pixels,) = (name for name, buffer in captured.values.items() if buffer.dtype == torch.bfloat16)
        parts, expected = (
            parts_of(replayed.values[pixels])
            for replayed in (
                tower.prepare_encoder_cudagraph_replay_buffers(of, ITEMS, FRAMES, path=path)
                for of in (selected, straight)
            )
        )
        assert len(parts) > 1
        assert {part.untyped_storage().data_ptr() for part in parts} <= given
        assert torch.equal(torch.cat(list(parts)), torch.cat(list(expected)))


@each_tower
def test_crops_may_be_missing_and_whole_images_may_not(case: Case) -> None:
    config = case.tower.get_encoder_cudagraph_config()
    if "local" not in config.paths:
        assert not any(path.allow_zero_tokens for path in config.paths.values())
        return
    low, high = case.tower.get_encoder_cudagraph_budget_range(None)
    for path, view in case.tower.views.items():
        assert config.paths[path] == fx.EncoderCudaGraphPathConfig(view.tokens, path == "local")
        inputs = case.inputs.make(case.images)
        for wrong in (inputs[view.input_name][1:], inputs[view.input_name][..., 1:], None):
            with pytest.raises(fx.InputError, match=f"{view.input_name}: expected .*{view.shape[-1]}"):
                case.tower.get_encoder_cudagraph_item_specs({**inputs, view.input_name: wrong})
        manager = fx.EncoderCudaGraphManager(
            case.tower,
            fx.EncoderConfig(paths={path: {"token_budgets": [1]}}, max_items_per_batch=1),
            log_interval=0,
        )
        manager.paths[path].compile()
        assert f"paths.{path}.token_budgets: 1 has no room for a tile" in manager.reports[-1]
    assert (low, high) == (case.tower.views["global"].tokens, 8 * low)


# --- item arithmetic


@each_tower
def test_items_have_the_sizes_that_follow_from_their_formula(case: Case) -> None:
    batch = [*case.images, *case.videos]
    made = case.inputs.make(batch)
    specs = case.tower.get_encoder_cudagraph_item_specs(made)
    assert [type(spec) for spec in specs] == [fx.EncoderItemSpec] * len(batch)
    assert [spec.output_tokens for spec in specs] == [case.inputs.tokens(item) for item in batch]
    for spec, item in zip(specs, batch, strict=True):
        paths = {path: spec.get_path_output_tokens(path) for path in case.inputs.budgets}
        assert paths == case.inputs.path_tokens(item)
        assert type(spec.input_size) is int
        assert spec.input_size > 0
    for indices in ([len(batch) - 1], list(range(len(batch))), []):
        selected = case.tower.select_encoder_cudagraph_items(made, indices)
        assert case.tower.get_encoder_cudagraph_item_specs(selected) == [specs[i] for i in indices]


@each_tower
def test_a_video_is_its_parts_one_after_the_other(case: Case) -> None:
    """Of a tower that says so: it encodes every frame as if it were alone."""
    if not (isinstance(case.tower, fx.PackedTower) and case.tower.frames_are_independent):
        return
    pixels, grid = case.inputs.video_keys  # type: ignore[attr-defined]
    made = case.inputs.make(items("video", [(5, 4, 6)]))[pixels].unflatten(0, (5, -1))
    rows = [
        encoded(case.tower, {pixels: part.flatten(0, 1), grid: torch.tensor([[len(part), 4, 6]])})[0]
        for part in (made, *made.split([1, 2, 2]))
    ]
    torch.testing.assert_close(torch.cat(rows[1:]), rows[0], rtol=0, atol=1e-5)


# --- padding


@each_tower
def test_videos_are_refused_where_images_alone_are_taken(case: Case) -> None:
    if not case.videos:
        inputs = {**case.inputs.make(case.images), "pixel_values_videos": torch.zeros(2, 3, 8, 8)}
        with pytest.raises(fx.InputError, match=r"pixel_values_videos: .* takes images only; leave it out"):
            encoded(case.tower, inputs)


# --- batches that are special


@each_captured
def test_no_items_are_a_valid_batch(case: Case) -> None:
    nothing = case.inputs.make([])
    before = case.manager.stats()
    assert case.tower.get_encoder_cudagraph_item_specs(nothing) == []
    assert case.manager.execute(nothing) == []
    with pytest.raises(fx.InputError, match="mm_kwargs: expected a mapping"):
        case.manager.execute({})
    assert case.manager.stats().items == before.items


@each_captured
def test_captures_follow_weights_that_are_loaded_in_place(case: Case) -> None:
    """Also the tables that were folded from them."""
    tower, batch = case.tower, case.inputs.make(case.images)
    before = case.manager.execute(batch)
    weights = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    fresh = make_case(case.name)
    try:
        for parameter in fresh.tower.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
        tower.load_state_dict(fresh.tower.state_dict())
        after = case.manager.execute(batch)
        for embedding, item in zip(after, case.images, strict=True):
            torch.testing.assert_close(embedding, fresh.alone(item), rtol=1e-4, atol=1e-4)
        assert (after[0] - before[0]).abs().max() > 0.1
    finally:
        for name, tensor in tower.state_dict().items():
            tensor.data.copy_(weights[name])  # which leaves no version
    torch.testing.assert_close(case.manager.execute(batch), before)


# --- Qwen2.5-VL's windows, which share the segments of a capture with frames

WINDOWED = "Qwen2_5_VisionTransformerPretrainedModel"
of_windows = pytest.mark.parametrize(
    "case", [pytest.param(WINDOWED, marks=marks(WINDOWED))], indirect=True, scope="module"
)
sides = st.integers(1, 10).map(lambda n: 2 * n)


@of_windows
def test_vllm_42787_windows_and_frames_share_a_budgets_segments(case: Case) -> None:
    images = items("image", [(1, 2, 2), (1, 8, 8), (1, 24, 24), (1, 2, 34)])
    inputs = case.inputs.make([*images, *items("video", [(5, 8, 8), (3, 12, 10)])])
    assert case.tower.item_frames(inputs) == [1, 1, 1, 1, 5, 3]
    # 1, 1, 9, 5, 5 and 12 windows, of which 4 take a frame's place.
    assert case.tower.item_segments(inputs) == [1, 1, 3, 2, 5, 3]


@of_windows
@settings(max_examples=40)
@given(grids=st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=5))
def test_vllm_42796_a_capture_has_room_for_every_batch_that_is_planned_for_it(
    case: Case, grids: list[Any]
) -> None:
    inputs, path = case.inputs.make(items("image", grids)), case.manager.paths["default"]
    for batch in case.manager.plan(inputs).batches:
        if (budget := batch.paths["default"].budget) is None:
            continue
        values = path.values(case.tower.select_encoder_cudagraph_items(inputs, list(batch.indices)))
        captured = path.best_capture(path.ladder, budget, values)
        for name in ("cu_seqlens", "cu_window_seqlens"):
            assert values[name].shape[0] <= captured.inputs.buffers[name].tensor.shape[0]


@of_windows
def test_narrow_images_take_a_larger_budget_or_the_exact_shape(case: Case) -> None:
    config = fx.EncoderConfig(token_budgets=(256, 512), max_items_per_batch=2, mode="full")
    wide = fx.EncoderCudaGraphManager(case.tower, config, log_interval=0)
    wide.paths["default"].bind(case.manager.programs["default"])
    wide.capture()
    # 14 and 16 windows of 196 and 250 tokens, 50 and 125 windows of 200 and 500.
    budgets = {(1, 28, 28): 256, (1, 20, 50): 256, (1, 2, 400): 512, (1, 2, 1000): None}
    for item in items("image", [*budgets]):
        inputs = case.inputs.make([item])
        (batch,) = wide.plan(inputs).batches
        assert batch.paths["default"].budget == budgets[item.size]
        torch.testing.assert_close(wide.execute(inputs), [case.alone(item)], rtol=0, atol=1e-5)
    assert wide.stats().misses == {fx.MissReason.TOO_MANY_SEGMENTS: 1}


@of_windows
def test_at_the_exact_shape_each_attention_has_its_own_bound(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []
    original = PerSegment.__call__

    def attend(kernel: Any, q: Any, k: Any, v: Any, lengths: Any, bound: int, *rest: Any, **more: Any) -> Any:
        bounds.append((len(lengths) - 1, bound))
        return original(kernel, q, k, v, lengths, bound, *rest, **more)

    manager = case.manager_in("none")
    monkeypatch.setattr(PerSegment, "__call__", attend)
    manager.execute(case.inputs.make(items("image", [(1, 12, 10), (1, 4, 6)])))
    # 6 x 5 tokens are 4 windows, the largest of 4 x 4; 2 x 3 tokens are one.
    assert bounds == [(5, 64), (2, 120)]


@of_windows
def test_one_frame_alone_narrows_the_lengths_of_frames_only(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    program: Any = case.manager.programs["default"]
    assert program.region.segment_inputs == ("cu_window_seqlens", "cu_seqlens")
    assert program.region.frame_lengths == "cu_seqlens"
    path = case.manager.paths["default"]
    request = path.ladder.request(16)
    before, after = (
        {name: buffer.tensor.shape[0] for name, buffer in each.inputs.buffers.items()}
        for each in (request, request.single_segment())
    )
    assert (before["cu_seqlens"], after["cu_seqlens"]) == (10, 2)
    assert {**before, "cu_seqlens": 2} == after
    single = CapturedForward(request.single_segment(), "full", path.scope.pool)
    monkeypatch.setattr(path.captured[16], "for_one_segment", single)
    for frames, captured in (([(1, 4, 6)], single), ([(1, 4, 6), (1, 4, 4)], path.captured[16])):
        values = path.values(case.inputs.make(items("image", frames)))
        assert path.best_capture(path.ladder, 16, values) is captured


@of_windows
def test_an_order_that_reaches_into_pad_rows_is_not_replayed(case: Case) -> None:
    path = case.manager.paths["default"]
    values: Any = path.values(case.inputs.make(items("image", [(1, 4, 6)])))
    captured = path.best_capture(path.ladder, 16, values)
    for name in ("window_permutation", "inverse_permutation"):
        with pytest.raises(ReplayError, match=f"{name}: got an order of 24 rows with entries from"):
            captured.inputs.buffers[name].check(values[name] + 1)
