"""The manager over a real tower: every item equals eager's, whatever the batch, the mode and the budget."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.errors import InputError, ReplayError
from fxsplit_encoder.manager.tower import ItemReader
from fxsplit_encoder.tuning.trace import read_run, read_trace

from .mock_towers import assert_equal_items

Grid = tuple[int, int, int]
MODES = ["auto", "full", "piecewise", "none"]
REASONS = fx.MissReason


sides = st.integers(1, 6).map(lambda n: 2 * n)
image_grids = st.tuples(st.just(1), sides, sides)
video_grids = st.tuples(st.integers(1, 5), st.integers(1, 3).map(lambda n: 2 * n), st.just(4))
batches = st.tuples(st.lists(image_grids, max_size=6), st.lists(video_grids, max_size=2))


SEQUENCE = [
    ([(1, 2 * (1 + 5 * n % 4), 2 * (1 + 3 * n % 5)) for n in range(16)], []),
    ([], [(8, 4, 4), (2, 8, 4)]),
    ([], []),
    ([(1, 8, 8), (1, 2, 2)], [(4, 4, 4), (1, 2, 2)]),
]


@settings(max_examples=20)
@given(st.sampled_from(MODES), st.lists(batches, min_size=1, max_size=3), st.integers(0, 99))
@example("auto", SEQUENCE, 0)
@example("full", SEQUENCE, 0)
@example("piecewise", SEQUENCE, 0)
@example("none", SEQUENCE, 0)
def test_any_sequence_of_batches_equals_eager(
    managers: Any, make_batch: Any, assert_as_eager: Any, mode: str, sequence: Any, seed: int
) -> None:
    for images, videos in sequence:
        inputs = make_batch(images, videos, seed=seed)
        before = managers[mode].stats().items
        assert_as_eager(managers[mode], inputs)
        assert managers[mode].stats().items == before + len(images) + len(videos)


# --- what is not served by a replay


@pytest.fixture
def full(make_captured: Any) -> Any:
    return make_captured(mode="full")


UNSERVED: dict[str, tuple[dict[str, Any], list[Grid], list[Grid], int, fx.MissReason]] = {
    "over_every_budget": ({}, [(1, 4, 4), (1, 18, 18), (1, 16, 16)], [], 2, REASONS.OVER_LARGEST_BUDGET),
    "vllm_40445_too_many_frames": ({}, [(1, 2, 2)], [(9, 2, 2), (8, 2, 2)], 2, REASONS.TOO_MANY_FRAMES),
    # Not a video: the frames are not limited, the attention segments of a capture are.
    "too_many_segments": ({}, [(30, 2, 2)], [], 0, REASONS.TOO_MANY_SEGMENTS),
    "disabled": ({"enabled": False}, [(1, 4, 4)], [], 0, REASONS.DISABLED),
    "mode_none": ({"mode": "none"}, [(1, 4, 4)], [], 0, REASONS.DISABLED),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_no_replay_serves_is_encoded_and_counted(
    name: str, make_captured: Any, make_batch: Any, assert_as_eager: Any
) -> None:
    options, images, videos, hits, reason = UNSERVED[name]
    manager, inputs = make_captured(**{"mode": "full", **options}), make_batch(images, videos)
    missed = {reason: len(images) + len(videos) - hits}
    assert manager.plan(inputs).misses == missed
    assert_as_eager(manager, inputs)
    stats = manager.stats()
    assert (stats.hits, stats.misses) == (hits, missed)
    assert bool(manager.budget_graphs["default"]) == (not options)


def test_what_was_captured_can_be_inspected(full: Any) -> None:
    graphs = full.budget_graphs["default"]
    assert sorted(graphs) == [4, 16, 32, 64]
    graph = graphs[16]
    assert (graph.token_budget, graph.max_batch_size, graph.max_frames_per_batch) == (16, 4, 8)
    assert graph.mode == "full"
    assert graph.output_buffer.shape == (16, 288)
    assert graph.input_buffers["pixel_values"].shape == (64, 1536)
    graph.graph.replay()
    assert full.reports == []


@pytest.mark.parametrize("max_frames", [1, 64, 38_400])
def test_found_a_found_b_small_budgets_stay_small_with_video(tiny_towers: Any, max_frames: int) -> None:
    settings = fx.EncoderConfig(
        mode="full", token_budgets=(64, 512), max_items_per_batch=64, max_frames_per_batch=max_frames
    )
    manager = fx.EncoderCudaGraphManager(tiny_towers.wrapped, settings)
    for capture in manager.planned_captures().captures:
        made = manager.paths["default"].capture_values(capture.key.budget)
        assert made["pixel_values"].shape[0] == 4 * capture.key.budget
    small, large = manager.planned_captures().captures
    assert small.input_bytes < large.input_bytes / 7


def test_plans_are_kept_until_captures_change(full: Any, make_batch: Any) -> None:
    inputs, other = make_batch([(1, 4, 4)], seed=1), make_batch([(1, 4, 4)], seed=2)
    plan = full.plan(inputs)
    assert plan.hits == 1
    assert full.plan(other) is plan  # of the same sizes
    # The same sizes of another modality are another plan.
    assert full.plan({"video_grid_thw": inputs["image_grid_thw"]}) is not plan
    full.clear()
    assert full.plan(inputs).batches[0].paths["default"].budget == 4  # of a full ladder
    full.capture()
    assert full.plan(inputs) == plan
    assert full.plan(inputs) is not plan


def test_videos_that_are_not_captured_leave_images_their_replays(
    tiny_towers: Any,
    make_captured: Any,
    make_batch: Any,
    assert_as_eager: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a tower whose videos lose tokens by their content, so that images alone have known sizes."""
    monkeypatch.setattr(tiny_towers.wrapped, "modalities", ("image",), raising=False)
    manager = make_captured(mode="full")
    assert manager.limits.max_frames_per_batch == 0
    assert manager.supports_modality("image") and not manager.supports_modality("video")
    inputs = make_batch([(1, 4, 4), (1, 2, 2)], [(2, 4, 4), (1, 2, 2)])
    assert manager.plan(inputs).misses == {fx.MissReason.UNSUPPORTED_INPUT: 2}
    assert_as_eager(manager, inputs)
    stats = manager.stats()
    assert (stats.hits, stats.misses) == (2, {fx.MissReason.UNSUPPORTED_INPUT: 2})
    assert sum(budget.real_tokens for budget in stats.budgets.values()) == 5
    # At most four images: no room for frames anywhere.
    for capture in manager.paths["default"].captured.values():
        assert len(capture.inputs.tensors["cu_seqlens"]) <= 4 + 2


# --- traces


def test_every_request_is_a_line_of_the_trace(tiny_towers: Any, make_batch: Any, tmp_path: Any) -> None:
    config = fx.EncoderConfig(mode="none", token_budgets=(4, 16), max_items_per_batch=2)
    manager = fx.EncoderCudaGraphManager(tiny_towers.wrapped, config)
    manager.record_trace(tmp_path / "trace.jsonl")
    manager.execute(make_batch([(1, 4, 4), (1, 2, 2)], [(3, 2, 4)]))
    manager.plan(make_batch([(1, 8, 8)]))  # encodes nothing
    with pytest.raises(InputError, match="image_grid_thw describes 16 patches"):
        manager.execute({**make_batch([(1, 4, 4)]), "pixel_values": torch.zeros(15, 1536)})
    manager.execute({"pixel_values": torch.zeros(0, 1536), "image_grid_thw": torch.zeros(0, 3).long()})
    manager.execute(make_batch([(1, 2, 4)]))
    read = read_trace(tmp_path / "trace.jsonl").planned()
    sizes = [[(item.spec.input_size, item.spec.output_tokens) for item in request] for request in read]
    assert sizes == [[(16, 4), (4, 1), (24, 6)], [], [(8, 2)]]
    assert [tuple(item.segments for item in request) for request in read] == [(1, 1, 3), (), (1,)]
    (run,), requests = read_run(tmp_path / "trace.jsonl")
    assert (run.tower, run.device, run.dtype) == ("Qwen3VLVisionModel", "CPU", "float32")
    assert run.config == {"mode": "none", "token_budgets": [4, 16], "max_items_per_batch": 2}
    assert run.paths["default"].budgets == (4, 16) and run.paths["default"].captures == ()
    served = [batch.paths["default"] for request in requests for batch in request.batches]
    assert {path.result for path in served} == {"disabled"}
    with pytest.raises(InputError, match=r"absent/trace\.jsonl: cannot be written: No such file"):
        manager.record_trace(tmp_path / "absent" / "trace.jsonl")
    manager.record_trace("/dev/full")
    assert len(manager.execute(make_batch([(1, 2, 4)]))) == 1, "a full disk costs no results"
    manager.record_trace(tmp_path / "trace.jsonl")
    manager.execute(make_batch([(1, 2, 4)]))
    assert len(read_run(tmp_path / "trace.jsonl").requests) == 4, "another recording appends"


def test_the_trace_tells_how_requests_were_served(
    tiny_towers: Any, make_batch: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fx.EncoderConfig(token_budgets=(4, 16), max_items_per_batch=2, mode="breakable")  # no trace
    manager = fx.EncoderCudaGraphManager(tiny_towers.wrapped, config)
    manager.record_trace(tmp_path / "trace.jsonl")
    manager.execute(make_batch([(1, 4, 4)]))
    manager.capture()
    manager.execute(make_batch([(1, 4, 4), (1, 8, 8)]))
    manager.execute(make_batch([(1, 16, 16)]))
    monkeypatch.setattr(CapturedForward, "load", mock.Mock(side_effect=ReplayError("too large")))
    manager.execute(make_batch([(1, 4, 4)]))
    runs, requests = read_run(tmp_path / "trace.jsonl")
    assert [[c.budget for c in run.paths["default"].captures] for run in runs] == [[], [4, 16]]
    assert all(capture.num_bytes > 0 for capture in runs[1].paths["default"].captures)
    assert runs[1].paths["default"].costs is None, "without a GPU nothing is measured"
    served = [
        [(b.items, p.tokens, p.budget, p.result, p.eager) for b in request.batches for p in b.paths.values()]
        for request in requests
    ]
    assert served == [
        [((0,), 4, None, "not_captured", True)],
        [((0,), 4, 4, "hit", False), ((1,), 16, 16, "hit", False)],
        [((0,), 64, None, "over_largest_budget", True)],
        [((0,), 4, None, "extent_exceeded", True)],
    ]
    assert (manager.stats().hits, len(manager.stats().misses)) == (2, 3)
    assert all(request.host_ms > 0 for request in requests)


# --- inputs


@pytest.mark.parametrize("mode", ["full", "piecewise", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_pixels_may_have_any_dtype(
    mode: str, dtype: torch.dtype, managers: Any, make_batch: Any, encode: Any, tiny_towers: Any
) -> None:
    inputs = make_batch([(1, 4, 4), (1, 2, 2)])
    inputs["pixel_values"] = (8 * inputs["pixel_values"].abs()).to(dtype)
    expected = encode(tiny_towers.reference, {**inputs, "pixel_values": inputs["pixel_values"].float()})
    output = managers[mode].execute(inputs)
    assert_equal_items(output, expected)
    assert {o.dtype for o in output} == {torch.float32}


@pytest.mark.parametrize("mode", ["full", "none"])
def test_pixels_and_grids_may_be_strided_and_of_inference_mode(
    mode: str, managers: Any, make_batch: Any, encode: Any, tiny_towers: Any
) -> None:
    inputs = make_batch([(1, 4, 4), (1, 2, 2)])
    expected = encode(tiny_towers.reference, inputs)
    pixels = inputs["pixel_values"]
    strided = {
        "pixel_values": torch.stack([pixels, pixels], dim=2)[:, :, 0],
        "image_grid_thw": inputs["image_grid_thw"].t().contiguous().t(),
    }
    assert not strided["pixel_values"].is_contiguous()
    assert_equal_items(managers[mode].execute(strided), expected)
    with torch.inference_mode():
        made = {name: tensor.clone() for name, tensor in inputs.items()}
        assert_equal_items(managers[mode].execute(made), expected)
    assert_equal_items(managers[mode].execute(made), expected)
    (first, _) = managers[mode].execute({**inputs, "image_grid_thw": [[1, 4, 4], (1, 2, 2)]})
    assert_equal_items([first], expected[:1])
    assert not first.requires_grad
    first.add_(1)  # an ordinary tensor, the caller's own


def test_inputs_are_left_as_they_are(managers: Any, make_batch: Any) -> None:
    inputs = make_batch([(1, 8, 8)], [(2, 4, 4)])
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    managers["full"].execute(inputs)
    assert inputs.keys() == kept.keys()
    assert all(torch.equal(inputs[name], kept[name]) for name in kept)


def test_what_is_not_a_tower_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"tower: Linear lacks methods of SupportsEncoderCudaGraph; pass what"
    ):
        fx.EncoderCudaGraphManager(nn.Linear(2, 2))


# --- requests of items that came before are not read again


def test_pixels_of_other_kinds_are_still_looked_at(
    full: Any, make_batch: Any, encode: Any, tiny_towers: Any
) -> None:
    inputs = make_batch([(1, 4, 6)])
    pixels, expected = inputs["pixel_values"], encode(tiny_towers.reference, inputs)
    for _ in range(2):
        for other in (pixels, pixels.double(), list(pixels.split(5))):
            assert_equal_items(full.execute({**inputs, "pixel_values": other}), expected)
        for wrong in (pixels[1:], pixels[:, 1:], pixels.bool(), pixels.to("meta"), None, []):
            with pytest.raises(InputError, match="pixel_values"):
                full.execute({**inputs, "pixel_values": wrong})


@pytest.mark.parametrize("kept", [1, 3])
def test_little_is_kept(
    full: Any, make_batch: Any, assert_as_eager: Any, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr("fxsplit_encoder.manager.tower._KEPT_ITEMS", kept)
    monkeypatch.setattr("fxsplit_encoder.manager.request_plans._KEPT_PLANS", kept)
    read, ask = [], full.tower.get_encoder_cudagraph_item_specs

    def watched(mm_kwargs: dict[str, Any]) -> Any:
        read.append(mm_kwargs)
        return ask(mm_kwargs)

    monkeypatch.setattr(full.tower, "get_encoder_cudagraph_item_specs", watched)
    plans: list[Any] = []
    for height in (2, 4, 6, 8, 4, 2):
        inputs = make_batch([(1, height, 2)])
        plans.append(full.plan(inputs))
        assert full.plan(inputs) is plans[-1]
    assert len(read) == 6 and plans[-1] is not plans[0] and plans[-2] is not plans[1]
    assert_as_eager(full, make_batch([(1, 2, 2)]))


def test_what_a_description_fails_at_is_told_by_the_items() -> None:
    class Failing:
        def described_items(self, mm_kwargs: dict[str, Any]) -> object:
            raise AttributeError("no such thing")

        def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
            raise TypeError("no items")

    with pytest.raises(InputError, match="TypeError: no items"):
        ItemReader(Failing()).read({"count": 1})
