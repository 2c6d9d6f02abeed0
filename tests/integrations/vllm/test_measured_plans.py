"""The plans for the workloads of docs/vllm.md on a device that takes what was measured there.

What runs is the code that chooses: the ladder, the prices, and packing. What stands in is the device: a run
takes a time that was fitted to an H200's over Qwen3-VL-8B's encoder in vLLM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxsplit_encoder.capture.forward import MeasuredRun, ProgramBody
from fxsplit_encoder.capture.ladder import BudgetLadder
from fxsplit_encoder.planning.costs import HOST_MS_PER_BATCH, CostModel, PathCosts
from fxsplit_encoder.planning.limits import CaptureKey, Limits, default_budgets
from fxsplit_encoder.planning.plan import Item, Plan
from fxsplit_encoder.planning.planner import Captured, build_plan
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.runtime.measure import MeasuredForward

MAX_ITEMS = 8
BUDGETS = tuple(default_budgets(64, 8192))
ROWS = 4
"""Patches of an output token."""

_MIXED = [(14, 14), (28, 28), (42, 28), (56, 56), (20, 40), (48, 64)]
WORKLOADS = {
    "1x224": [(14, 14)],
    "1x448": [(28, 28)],
    "1x896": [(56, 56)],
    "1x1344": [(84, 84)],
    "mixed8": [*_MIXED, (32, 32), (40, 60)],
    "mixed8_big": [*_MIXED[:5], (84, 84), _MIXED[5], (32, 32)],
    "20x336": [(20, 20)] * 20,
}
"""Patches of the height and width of every image."""


class Device:
    """Milliseconds of the device and of the host, which an eager run waits for."""

    def __init__(self, host: float, pair: float = 2.83e-7) -> None:
        self.host = host
        self.pair = pair

    def replay(self, tokens: int, segments: Sequence[float]) -> float:
        """Of a capture of so many tokens over segments of these lengths in patches."""
        return 2.63 + 0.00827 * tokens + self.pair * sum(length**2 for length in segments)

    def eager(self, tokens: int, segments: Sequence[float]) -> MeasuredRun:
        return MeasuredRun(max(self.host, self.replay(tokens, segments)), self.host)


def measured_forward(device: Device, compiled: bool) -> MeasuredForward:
    """Captures are laid out as eight equal images, runs of a program as one."""
    share = 1 / MAX_ITEMS
    if not compiled:
        return MeasuredForward((), device.pair, ROWS, share, share)
    eager = tuple((budget, device.eager(budget, eight(budget)).wall) for budget in BUDGETS)
    return MeasuredForward(eager, device.pair, ROWS, share, eager_host=device.host)


def eight(budget: int) -> list[float]:
    return [budget * ROWS / MAX_ITEMS] * MAX_ITEMS


class Taken:
    """A capture that takes what the device says."""

    is_unbroken = False
    mode = "full"

    def __init__(self, milliseconds: float) -> None:
        self._milliseconds = milliseconds

    def measure(self) -> float:
        return self._milliseconds

    def release(self) -> None:
        pass


class TimedLadder(BudgetLadder):
    """A ladder whose captures and runs take what the device says."""

    def __init__(self, device: Device, measured: MeasuredForward, compiled: bool) -> None:
        def request(budget: int) -> Any:
            single = (lambda: None) if compiled else None
            body = ProgramBody.__new__(ProgramBody) if compiled else None
            return SimpleNamespace(budget=budget, single_segment=single, body=body)

        pool = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
        super().__init__(request, "auto", pool, attention_ms=measured.attention_ms)  # type: ignore[arg-type]
        self._device = device

    def _measure_exact(self, request: Any) -> MeasuredRun:
        one = isinstance(request.body, ProgramBody)
        segments = [request.budget * ROWS] if one else eight(request.budget)
        return self._device.eager(request.budget, segments)

    def _candidates(self, budget: int, request: Any) -> Any:
        return {"full": Taken(self._device.replay(budget, eight(budget)))}

    def _record_single_segment(self, budget: int, request: Any) -> Any:
        return Taken(self._device.replay(budget, [budget * ROWS]))


def choices(device: Device, compiled: bool) -> tuple[Captured, PathCosts]:
    """What is captured, and the prices."""
    measured = measured_forward(device, compiled)
    ladder = TimedLadder(device, measured, compiled)
    for budget in reversed(BUDGETS):
        ladder.capture(budget)
    prices = measured.with_captures(ladder, {}, compiled=compiled)
    kept = (ladder.captured, ladder.no_graph_needed)
    return Captured(*({CaptureKey("default", budget, ()) for budget in each} for each in kept)), prices


def plan_of(images: Sequence[tuple[int, int]], captured: Captured, prices: PathCosts) -> Plan:
    items = [Item(EncoderItemSpec(height * width, height * width // ROWS)) for height, width in images]
    limits = Limits({"default": BUDGETS}, MAX_ITEMS, 0)
    return build_plan(items, limits, captured, costs=CostModel({("default", ()): prices}, HOST_MS_PER_BATCH))


def taken(device: Device, lengths: Sequence[float], budget: int | None) -> float:
    """What a batch of images takes that is replayed, or is not."""
    tokens = round(sum(lengths) / ROWS)
    run = device.eager(tokens, lengths).wall if budget is None else device.replay(budget, lengths)
    return run + HOST_MS_PER_BATCH


def cheapest(device: Device, lengths: Sequence[int]) -> float:
    """What the best of all partitions takes, with every budget captured."""

    def of_batch(mask: int) -> float:
        batch = [length for bit, length in enumerate(lengths) if mask >> bit & 1]
        fitting = next((budget for budget in BUDGETS if budget * ROWS >= sum(batch)), None)
        return min(taken(device, batch, None), taken(device, batch, fitting))

    @functools.cache
    def of_rest(mask: int) -> float:
        if not mask:
            return 0.0
        others, best = mask & (mask - 1), math.inf
        subset = others
        while True:
            best = min(best, of_batch(mask ^ subset) + of_rest(subset))
            if not subset:
                return best
            subset = (subset - 1) & others

    return of_rest((1 << len(lengths)) - 1)


@pytest.mark.parametrize("host", [14.0, pytest.param(22.0, marks=pytest.mark.exhaustive), 28.0])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_plan_is_slower_than_the_cheapest(workload: str, compiled: bool, host: float) -> None:
    device = Device(host)
    captured, prices = choices(device, compiled)
    assert captured.budgets
    assert prices.attention == pytest.approx(device.pair, rel=0.01)  # no run is too short for it
    images = WORKLOADS[workload]
    lengths = [height * width for height, width in images]
    plan = plan_of(images, captured, prices)
    actual = 0.0
    for batch in plan.batches:
        path = batch.paths["default"]
        own = taken(device, [lengths[index] for index in batch.indices], path.budget)
        assert path.milliseconds == pytest.approx(own - HOST_MS_PER_BATCH, rel=0.05)
        actual += own
    if len(images) <= MAX_ITEMS:
        assert actual <= 1.03 * cheapest(device, lengths)
    assert actual <= 1.03 * taken(device, lengths, None), "than all images at once, eagerly"
