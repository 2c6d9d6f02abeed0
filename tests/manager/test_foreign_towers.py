"""The manager over towers that were written for vLLM's encoder protocol."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.tower import ItemReader
from fxsplit_encoder.planning.plan import MissReason

from . import managers
from .mock_towers import (
    Config,
    ItemSpec,
    PackedModel,
    SplitModel,
    UntraceableModel,
    alone,
    assert_equal_items,
    assert_serves,
    batch,
)

pytestmark = pytest.mark.usefixtures("traced_once")
captured = functools.partial(managers.captured, debug=False)


@pytest.fixture(params=[PackedModel, SplitModel, UntraceableModel], ids=lambda c: c.__name__)
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.mark.parametrize("mode", ["full", "piecewise", "auto", "none"])
def test_vllm_40576_a_foreign_tower_is_planned_captured_and_replayed(model: Any, mode: str) -> None:
    manager = captured(model, mode=mode, debug=True)
    assert sorted(manager.budget_graphs["default"]) == ([] if mode == "none" else [4, 8, 16])
    for lengths in ((3,), (2, 5), (1, 1, 1, 1), (8, 8), (3,), (17,)):
        # A batch in one piece, so that the numbers of the items are those of the whole.
        assert len(manager.plan(batch(*lengths)).batches) == 1
        assert_serves(manager, batch(*lengths))
    stats = manager.stats()
    assert (stats.hits, stats.items) == ((0, 11) if mode == "none" else (10, 11))


@pytest.mark.parametrize("mode", ["full", "exact"])
def test_a_batch_that_the_tower_has_no_room_for_falls_back_whole(
    mode: str, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager = captured(model, token_budgets=(8,), mode=mode, exact_min_hits=1)
    inputs, own = batch(3, 2), model.batch_values
    assert_serves(manager, inputs)
    expected = alone(model, inputs)
    model.encoder_eager_forward = lambda mm_kwargs, path="default": torch.cat(expected)
    for number, error in enumerate((RuntimeError("a (5) must match"), ValueError("too many")), 1):
        model.batch_values = mock.Mock(side_effect=error)
        with caplog.at_level(logging.WARNING, "fxsplit_encoder"):
            for _ in range(2):
                assert_equal_items(manager.execute(inputs), expected)
        assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 4 * number}
    assert manager.stats().fallback_runs == {"eager": 4}
    said = "path default, 5 tokens: the tower makes no inputs of this batch within 4 items and 0 video frames"
    for message in (f"{said}: RuntimeError: a (5) must match", f"{said}: ValueError: too many"):
        assert any(line.startswith(message) for line in caplog.messages)
    model.batch_values = mock.Mock(side_effect=InputError("lengths: expected 3, got 2"))
    with pytest.raises(InputError, match="expected 3, got 2"):
        manager.execute(inputs)
    model.batch_values = own
    assert manager.execute(inputs) and manager.stats().hits == 4


def test_the_engines_configuration_reaches_a_tower_that_is_asked_for_what_settings_leave_open() -> None:
    class ReadsScheduler(PackedModel):
        def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
            return 4, vllm_config.scheduler_config.max_num_batched_tokens

    engine = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=32))
    manager = fx.EncoderCudaGraphManager(ReadsScheduler(), vllm_config=engine)
    assert manager.limits.path_budgets["default"][-1] == 32
    assert manager.limits.max_items_per_batch == 4
    config = fx.EncoderConfig(token_budgets=(4, 8), max_items_per_batch=2)
    assert fx.EncoderCudaGraphManager(ReadsScheduler(), config).limits.path_budgets == {"default": (4, 8)}
    for settings in ({"token_budgets": (4, 8)}, {"max_items_per_batch": 2}):
        with pytest.raises(AttributeError, match="scheduler_config"):
            fx.EncoderCudaGraphManager(ReadsScheduler(), fx.EncoderConfig(**settings))


@pytest.mark.parametrize("method", ["item_modalities", "item_segments"])
def test_what_a_tower_tells_of_its_items_it_tells_of_each(method: str) -> None:
    tower = PackedModel()
    setattr(tower, method, lambda mm_kwargs: ["image"])
    manager = managers.manager_of(tower)
    with pytest.raises(InputError, match=rf"PackedModel\.{method}: expected one entry an item, 2; got 1"):
        manager.plan(batch(3, 2))


class LessMean(SplitModel):
    """Every row reads all others."""

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        output = super().encoder_cudagraph_forward(inputs, path)
        return output - output.mean(0)


class CountsSegments(SplitModel):
    """Reads how many segments a batch has, which captures of its token count do not tell apart."""

    declares_padding = False

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        output = super().encoder_cudagraph_forward(inputs, path)
        return output * inputs["lengths"].shape[0]


@pytest.mark.parametrize("mode", ["exact", "full"])
def test_a_tower_that_counts_segments_is_not_replayed(mode: str) -> None:
    manager = captured(CountsSegments(), mode=mode, token_budgets=(4, 8), exact_min_hits=1)
    for lengths in ((8,), (3, 5), (2, 2, 4), (8,)):
        assert_serves(manager, batch(*lengths))
    assert manager.stats().hits == 0


@pytest.mark.parametrize(
    ("declared", "misses", "report"),
    [
        (True, {fx.MissReason.NOT_CAPTURED: 3}, "padding changes its results: the output changes"),
        # One fills a budget and one comes twice: those are replayed without padding.
        (False, {fx.MissReason.PADDING_UNPROVED: 1}, "mean reduces over tokens"),
    ],
    ids=["declared, debugged", "not declared"],
)
def test_a_tower_that_mixes_rows_is_found_out(
    declared: bool, misses: dict[fx.MissReason, int], report: str
) -> None:
    model: Any = LessMean()
    if not declared:
        model.declares_padding = False
    manager = captured(model, token_budgets=(4, 8), max_items_per_batch=1, debug=declared)
    assert manager.budget_graphs["default"] == {}
    assert len(manager.reports) == 2 and all(report in line for line in manager.reports)
    for length in (3, 8, 3):
        assert_serves(manager, batch(length))
    assert manager.stats().misses == misses


def test_the_towers_code_runs_in_the_callers_inference_mode() -> None:
    manager, modes = captured(PackedModel(), compile=False), list[bool]()
    own = manager.tower.batch_values

    def watched(mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        modes.append(torch.is_inference_mode_enabled())
        return own(mm_kwargs)  # type: ignore[no-any-return]

    manager.tower.batch_values = watched
    for inputs in (batch(17), batch(3)):  # by the eager forward, and by a replay
        for mode in (torch.inference_mode, torch.no_grad):
            modes.clear()
            with mode():
                outputs = manager.execute(inputs)
            assert modes == [mode is torch.inference_mode]
            assert not any(output.is_inference() for output in outputs)
    assert manager.stats().hits == 2


# --- what vLLM's towers say of their items in ways of their own


two_budgets = functools.partial(managers.captured, token_budgets=(4, 8))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("vision_chunk",), None),
        (("image",), None),
        (("video",), MissReason.UNSUPPORTED_INPUT),
        ((), MissReason.UNSUPPORTED_INPUT),
    ],
)
def test_a_modality_of_another_name_is_served(names: tuple[str, ...], reason: MissReason | None) -> None:
    model: Any = PackedModel()
    config = replace(model.get_encoder_cudagraph_config(), modalities=list(names))
    model.get_encoder_cudagraph_config = lambda: config
    manager = two_budgets(model)
    assert_serves(manager, batch(3, 1))
    stats = manager.stats()
    assert (stats.hits, dict(stats.misses)) == ((2, {}) if reason is None else (0, {reason: 2}))


def test_sizes_may_be_elements_of_a_tensor() -> None:
    """As those of vLLM's Step3-VL."""
    model: Any = PackedModel()
    model.get_encoder_cudagraph_item_specs = lambda mm_kwargs: [
        ItemSpec(size, size, {"default": size}) for size in torch.tensor(mm_kwargs["lengths"])
    ]
    manager = two_budgets(model)
    assert_serves(manager, batch(3, 1))
    assert manager.stats().hits == 2


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"video_grid_thw": torch.tensor([[2, 4, 4], [7, 2, 2]])}, [2, 7]),
        ({"video_grid_thw": [[2, 4, 4]]}, [1, 1]),
        ({"image_grid_thw": [[1, 4, 4], [1, 2, 2]]}, [1, 1]),
    ],
)
def test_grids_of_videos_tell_their_frames(inputs: dict[str, Any], expected: list[int]) -> None:
    tower: Any = PackedModel()
    tower.get_encoder_cudagraph_item_specs = lambda mm_kwargs: [ItemSpec(16, 16)] * 2
    assert ItemReader(tower).read(inputs).segments == expected


def pad_plane(captured: torch.Tensor, value: torch.Tensor) -> None:
    captured.fill_(0)
    captured[:, : value.shape[1]].copy_(value)


class InPlanes(PackedModel):
    """As vLLM's MiniMax-M3, one of whose inputs has its rows in the second dimension."""

    def get_encoder_cudagraph_config(self) -> Config:
        config = super().get_encoder_cudagraph_config()
        config.padding_logics["item"] = pad_plane
        return config

    def made(self, values: dict[str, Any], budget: int | None = None) -> dict[str, Any]:
        return values | {"item": values["item"].expand(2, -1).contiguous()}

    def encoder_cudagraph_forward(self, inputs: dict[str, Any], path: str = "default") -> Any:
        return super().encoder_cudagraph_forward({**inputs, "item": inputs["item"][1]}, path)


def test_inputs_are_padded_along_any_dimension_by_their_padding_logic() -> None:
    model = InPlanes()
    manager = two_budgets(model)
    for inputs in (batch(3, 1, 2), batch(4, 4), batch(1), batch(5)):
        assert_serves(manager, inputs)
    assert manager.stats().misses == {}


@pytest.mark.parametrize(
    ("rows", "held"),
    [
        (lambda budget: budget, {4: 4, 7: 7, 16: 16}),
        (lambda budget: budget // 4 * 4, {4: 4, 7: 4, 16: 16}),  # vLLM's GLM-4.1V
        (lambda budget: min(budget // 2, 3) * 2, {4: 4, 7: 6, 16: 6}),  # Gemma 3
        (lambda budget: budget // 4 * 3, {4: 4, 7: 4, 16: 16}),  # DeepSeek-OCR, which adds rows later
    ],
)
def test_what_captures_hold_is_what_the_tower_makes_inputs_for(rows: Any, held: dict[int, int]) -> None:
    model: Any = PackedModel()
    own = model.capture_values
    model.capture_values = lambda budget: own(rows(budget))
    manager = two_budgets(model, token_budgets=tuple(held))
    assert manager.paths["default"].costs.max_tokens == held


# --- inputs for which a tower gives None


class Unused:
    """`sequence_lengths` is of use to another attention backend than the model's."""

    given: Any = None
    """What batches give."""

    def made(self, values: dict[str, Any], budget: int | None = None) -> dict[str, Any]:
        if budget is None and self.given == "no key":
            return values
        return values | {"sequence_lengths": self.given if budget is None else None}

    def encoder_cudagraph_forward(self, inputs: dict[str, Any], path: str = "default") -> Tensor:
        inputs = dict(inputs)
        assert inputs.pop("sequence_lengths") is None
        output: Tensor = super().encoder_cudagraph_forward(inputs, path)  # type: ignore[misc]
        return output

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        values = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0).values
        return self.encoder_cudagraph_forward({**values, "sequence_lengths": None})


class UnusedSplit(Unused, SplitModel): ...


class UnusedUntraceable(Unused, UntraceableModel): ...


@pytest.mark.parametrize("make", [UnusedSplit, UnusedUntraceable])
@pytest.mark.parametrize("mode", ["full", "piecewise", "breakable", "exact", "none"])
def test_an_input_that_is_none_is_not_used(make: Any, mode: str) -> None:
    model = make()
    manager = two_budgets(model, mode=mode, exact_min_hits=1)
    for given in (None, "no key"):
        model.given = given
        for lengths in ((3,), (2, 5), (9,)):
            assert_serves(manager, batch(*lengths))
    hits = {"none": 0, "exact": 8}.get(mode, 6)
    assert manager.stats().hits == hits
    for graph in manager.budget_graphs["default"].values():
        assert "sequence_lengths" not in graph.input_buffers


@pytest.mark.parametrize("make", [UnusedSplit, UnusedUntraceable])
def test_what_captures_are_made_without_goes_through_the_eager_forward(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    manager = two_budgets(model, mode="full")
    eager = []
    model.encoder_eager_forward = lambda mm_kwargs, path="default": eager.append(path) or torch.ones(3, 8)
    model.given = torch.tensor([3])
    (output,) = manager.execute(batch(3))
    assert eager == ["default"] and output.eq(1).all()
    assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 1}
    assert "sequence_lengths: this batch gives a value, and the tower gave None for captures" in caplog.text


def test_an_input_that_is_used_at_some_sizes_only_costs_these_sizes() -> None:
    class Varying(UntraceableModel):
        def made(self, values: dict[str, Any], budget: int | None = None) -> dict[str, Any]:
            return values | ({} if budget is None else {"extra": None if budget <= 8 else torch.ones(2)})

        def encoder_cudagraph_forward(self, inputs: dict[str, Any], path: str = "default") -> Tensor:
            return super().encoder_cudagraph_forward({n: v for n, v in inputs.items() if n != "extra"}, path)

    manager = two_budgets(Varying(), mode="full", token_budgets=(4, 8, 16))
    assert sorted(manager.budget_graphs["default"]) == [4, 8]
    assert any("extra is a tensor for 16 tokens and None for another number" in r for r in manager.reports)
    assert_serves(manager, batch(3, 2))
    assert manager.stats().hits == 2
