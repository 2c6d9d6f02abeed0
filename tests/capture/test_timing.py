"""How a call is timed: how often, and in which parts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from fxsplit_encoder.capture import forward
from fxsplit_encoder.capture.forward import MeasuredRun, measure_ms, measure_run
from fxsplit_encoder.pauses import pausing_by
from tests.pauses import Pauses

CPU = torch.device("cpu")


class Call:
    """One that takes as many milliseconds as it is told, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *took: float) -> None:
        self._took = list(took)
        self._now = 0.0
        monkeypatch.setattr(forward, "time", SimpleNamespace(perf_counter=lambda: self._now / 1e3))

    def __call__(self) -> None:
        self._now += self._took.pop(0)

    @property
    def left(self) -> int:
        return len(self._took)


def test_the_least_after_a_warm_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch, 900.0, 3.0, 1.0, 2.0)
    assert measure_run(call, CPU) == pytest.approx(MeasuredRun(1.0, 1.0))
    assert call.left == 0


def test_two_are_enough_of_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch, 25.0, 21.0, 20.0, 19.0)
    assert measure_ms(call, CPU) == pytest.approx(20.0)
    assert call.left == 1


@pytest.mark.parametrize(("took", "parts"), [(1.0, [4]), (20.0, [1, 1, 1])])
def test_a_run_that_takes_long_is_a_part_of_its_own(
    took: float, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(monkeypatch, *[took] * 4)
    left = [4]
    with pausing_by(Pauses(lambda: left.append(call.left))):
        measure_run(call, CPU)
    left.append(call.left)
    assert [before - after for before, after in itertools.pairwise(left)] == parts
