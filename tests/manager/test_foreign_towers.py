"""The manager over towers that were written for vLLM's encoder protocol."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError

from . import managers
from .mock_towers import (
    CompiledCountsFrames,
    CountsFrames,
    PackedModel,
    ReadsScheduler,
    SplitModel,
    UntraceableModel,
    Values,
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
        inputs = batch(*lengths)
        # A batch in one piece, so that the numbers of the items are those of the whole.
        assert len(manager.plan(inputs).batches) == 1
        output = manager.execute(inputs)
        assert_equal_items(output, alone(model, inputs))
        assert all(item.untyped_storage().nbytes() == item.nbytes for item in output)
    stats = manager.stats()
    assert (stats.hits, stats.items) == ((0, 11) if mode == "none" else (10, 11))


def videos(lengths: tuple[int, ...], frames: tuple[int, ...]) -> dict[str, Any]:
    return batch(*lengths) | {"frames": list(frames)}


@pytest.mark.parametrize(("make", "mode"), [(CountsFrames, "exact"), (CompiledCountsFrames, "full")])
def test_a_batch_that_the_tower_has_no_room_for_falls_back_whole(
    make: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    manager = captured(model, mode=mode, token_budgets=(4, 8), max_frames_per_batch=4, exact_min_hits=1)
    for lengths, frames, misses in (
        ((3, 5), (2, 2), {}),
        ((3, 5), (3, 3), {fx.MissReason.EXTENT_EXCEEDED: 2}),  # planned as two frames: nothing tells of six
        ((3, 5), (1, 1), {fx.MissReason.EXTENT_EXCEEDED: 2}),
    ):
        inputs = videos(lengths, frames)
        assert len(manager.plan(inputs).batches) == 1
        with caplog.at_level(logging.WARNING, "fxsplit_encoder"):
            output = manager.execute(inputs)
        assert_equal_items(output, alone(model, inputs))
        assert manager.stats().misses == misses
    assert manager.stats().hits == 4
    assert manager.stats().fallback_runs == {"eager": 1}
    (warning,) = [message for message in caplog.messages if "the tower makes no inputs" in message]
    assert warning.startswith(
        "path default, 8 tokens: the tower makes no inputs of this batch within 4 items and 4 video frames: "
        "RuntimeError: The size of tensor a (5) must match"
    )


@pytest.mark.parametrize("error", [ValueError("too many"), InputError("lengths: expected 3, got 2")], ids=str)
def test_bad_input_reaches_the_user_and_a_refusal_does_not(error: ValueError, model: Any) -> None:
    manager = captured(model, token_budgets=(8,))
    expected = alone(model, batch(3))

    def refuse(*args: Any, **kwargs: Any) -> Values:
        raise error

    model.prepare_encoder_cudagraph_replay_buffers = refuse
    model.encoder_eager_forward = lambda mm_kwargs, path="default": expected[0]
    if isinstance(error, InputError):
        with pytest.raises(InputError, match="expected 3, got 2"):
            manager.execute(batch(3))
    else:
        assert torch.equal(manager.execute(batch(3))[0], expected[0])
        assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 1}


def test_the_engines_configuration_reaches_a_tower_that_is_asked_for_what_settings_leave_open() -> None:
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


class LessMeanUndeclared(LessMean):
    declares_padding = False


class CountsSegments(SplitModel):
    """Reads how many segments a batch has, which captures of its token count do not tell apart."""

    declares_padding = False

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        output = super().encoder_cudagraph_forward(inputs, path)
        return output * inputs["lengths"].shape[0]


@pytest.mark.parametrize("mode", ["exact", "full"])
def test_a_tower_that_counts_segments_is_not_replayed(mode: str) -> None:
    model = CountsSegments()
    manager = captured(model, mode=mode, token_budgets=(4, 8), exact_min_hits=1)
    for lengths in ((8,), (3, 5), (2, 2, 4), (8,)):
        inputs = batch(*lengths)
        output = manager.execute(inputs)
        expected = model.encoder_eager_forward(inputs)
        torch.testing.assert_close(torch.cat(output), expected, rtol=0, atol=1e-5)
    assert manager.stats().hits == 0


@pytest.mark.parametrize(
    ("model", "debug", "misses", "report"),
    [
        (
            LessMean(),
            True,
            {fx.MissReason.NOT_CAPTURED: 3},
            "padding changes its results: the output changes by",
        ),
        # One fills a budget and one comes twice: those are replayed without padding.
        (LessMeanUndeclared(), False, {fx.MissReason.PADDING_UNPROVED: 1}, "mean reduces over tokens"),
    ],
    ids=["declared, debugged", "not declared"],
)
def test_a_tower_that_mixes_rows_is_found_out(
    model: Any, debug: bool, misses: dict[fx.MissReason, int], report: str
) -> None:
    manager = captured(model, token_budgets=(4, 8), max_items_per_batch=1, debug=debug)
    assert manager.budget_graphs["default"] == {}
    assert len(manager.reports) == 2 and all(report in line for line in manager.reports)
    for length in (3, 8, 3):
        assert_serves(manager, batch(length))
    assert manager.stats().misses == misses


# --- the mode that the tower's code runs in


class Watched(PackedModel):
    """Remembers in which mode its code ran."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[str, bool]] = []

    def prepare_encoder_cudagraph_replay_buffers(self, *args: Any, **kwargs: Any) -> Any:
        self.modes.append(("prepare", torch.is_inference_mode_enabled()))
        return super().prepare_encoder_cudagraph_replay_buffers(*args, **kwargs)

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Any:
        self.modes.append(("eager", torch.is_inference_mode_enabled()))
        return super().encoder_eager_forward(mm_kwargs, path)


def test_the_towers_code_runs_in_the_callers_inference_mode() -> None:
    manager = captured(Watched(), compile=False)
    for inputs, ran in ((batch(17), "eager"), (batch(3), "prepare")):
        for mode in (torch.inference_mode, torch.no_grad):
            manager.tower.modes.clear()
            with mode():
                outputs = manager.execute(inputs)
            assert manager.tower.modes[0] == (ran, mode is torch.inference_mode)
            assert not any(output.is_inference() for output in outputs)
    assert manager.stats().hits == 2
