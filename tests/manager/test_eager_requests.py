"""Requests that the tower's own forward encodes because it is quicker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.planning.costs import PathCosts

from .mock_towers import PackedModel, assert_equal_items, batch


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


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> fx.EncoderCudaGraphManager:
    """Of a tower that is captured as it is, whose eager forward is measured to win above four tokens."""
    costs = PathCosts({4: 5.0, 8: 100.0, 16: 100.0}, eager=((4, 9.0), (16, 10.0)))
    monkeypatch.setattr(EncoderPath, "costs", costs)
    config = fx.EncoderConfig(token_budgets=(4, 8, 16), max_items_per_batch=2, compile=False)
    made = fx.EncoderCudaGraphManager(Watched(), config, log_interval=0)
    made.capture()
    return made


def test_more_items_than_captures_hold_are_one_eager_run(manager: Any) -> None:
    inputs = batch(3, 2, 4, 3)
    expected = manager.tower.encoder_eager_forward(inputs).split(inputs["lengths"])
    assert_equal_items(manager.execute(inputs), list(expected))
    stats = manager.stats()
    assert stats.misses == {MissReason.EAGER_IS_FASTER: 4}
    assert stats.fallback_runs == {"eager": 1}
    assert all(budget.replays == 0 for budget in stats.budgets.values())


def test_the_towers_code_runs_in_the_callers_inference_mode(manager: Any) -> None:
    for inputs, ran in ((batch(3, 4), "eager"), (batch(3), "prepare")):
        for mode in (torch.inference_mode, torch.no_grad):
            manager.tower.modes.clear()
            with mode():
                outputs = manager.execute(inputs)
            assert manager.tower.modes[0] == (ran, mode is torch.inference_mode)
            assert not any(output.is_inference() for output in outputs)
    assert manager.stats().hits == 2
