"""Captures to be thrown away, which take the memory of those to come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.capture import CapturedForward
from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.kernels import is_measuring
from fxsplit_encoder.manager.rehearsal import Rehearsal
from fxsplit_encoder.parts import Parts

from .mock_towers import SplitModel

Recorded = list[tuple[str, int]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorded]:
    """`recorded(failing, **settings)`: the modes and rows that a rehearsal holds in the end."""

    def rehearse(failing: str = "", **settings: Any) -> Recorded:
        own = CapturedForward.recording

        def recording(self: CapturedForward, warmups: int) -> Parts[None]:
            if self.mode == failing:
                raise CaptureError("it looks at a value")
            yield from own(self, warmups)

        monkeypatch.setattr(CapturedForward, "recording", recording)
        config = fx.EncoderConfig(token_budgets=(4, 8), max_items_per_batch=4, **settings)
        manager = fx.EncoderCudaGraphManager(SplitModel(), config, log_interval=0)
        rehearsal = Rehearsal(manager)
        rehearsal.capture()
        held = [(each.mode, each.rows or 0) for each in rehearsal._captured]
        assert rehearsal.num_captures == len(held)
        assert not manager.is_captured() and manager.reports == []
        rehearsal.clear()
        assert rehearsal.num_captures == 0
        return held

    return rehearse


@pytest.mark.parametrize(
    ("mode", "failing", "expected"),
    [
        ("auto", "", ["full", "breakable"]),
        ("auto", "full", ["breakable"]),
        ("full", "", ["full"]),
        ("full", "full", ["breakable"]),
        # What a tower's own code is captured in where its program would be in pieces.
        ("piecewise", "", ["breakable"]),
        ("breakable", "breakable", ["full"]),
        ("none", "", []),
    ],
)
def test_every_mode_that_a_capture_tries_is_rehearsed(
    recorded: Callable[..., Recorded], mode: str, failing: str, expected: list[str]
) -> None:
    assert recorded(failing, mode=mode) == [(each, rows) for rows in (8, 4) for each in expected]


def test_what_cannot_be_captured_is_left_out(
    recorded: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("fxsplit_encoder.manager.path_forward.PathForward.request", fail)
    assert recorded() == []


def test_a_rehearsal_neither_compiles_nor_times(
    recorded: Callable[..., Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled or timed")

    record = CapturedForward.record

    def record_unmeasured(self: CapturedForward, warmups: int) -> None:
        assert not is_measuring(), "kernels would be compared"
        record(self, warmups)

    monkeypatch.setattr(CapturedForward, "record", record_unmeasured)
    for place in (
        *("manager.path_forward.PathForward.compile", "manager.path.measuring_forward"),
        *("capture.ladder.measuring_run", "capture.forward.measuring_run", "kernels.measure.Meter.measure"),
    ):
        monkeypatch.setattr(f"fxsplit_encoder.{place}", fail)
    assert len(recorded()) == 4
