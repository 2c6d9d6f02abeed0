"""What `BreakableCUDAGraphWrapper` promises on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.capture.breakable import BreakableCUDAGraphCapture
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.capture.wrapper import BreakableCUDAGraphWrapper

from .breakable_checks import make_tower

TOLERANCE = 1e-5


def captures_made(monkeypatch: pytest.MonkeyPatch) -> list[BreakableCUDAGraphCapture]:
    """The captures that are recorded from now on."""
    made: list[BreakableCUDAGraphCapture] = []
    enter = BreakableCUDAGraphCapture.__enter__
    monkeypatch.setattr(BreakableCUDAGraphCapture, "__enter__", lambda self: made.append(self) or enter(self))
    return made


def lengths(*boundaries: int, device: str) -> Tensor:
    return torch.tensor(boundaries, dtype=torch.int32, device=device)


@torch.no_grad()
def shapes_are_captured_once_and_replayed(device: str) -> None:
    tower = make_tower(device)
    wrapper = BreakableCUDAGraphWrapper(tower, debug=True)
    kept = []
    for rows in (6, 9, 6, 9, 6):
        x = torch.randn(rows, 32, device=device)
        for boundaries in ((0, rows, rows), (0, 2, rows)):
            cu_seqlens = lengths(*boundaries, device=device)
            expected = tower(x, cu_seqlens)
            got = wrapper(x, cu_seqlens=cu_seqlens)
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
            kept.append((got, expected))
    assert (wrapper.captures, wrapper.num_captures, wrapper.hits) == (2, 2, 10)
    assert not wrapper.misses
    for got, expected in kept:  # the callers' own
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def the_one_that_was_used_longest_ago_makes_room(device: str) -> None:
    tower = make_tower(device, depth=1)
    wrapper = BreakableCUDAGraphWrapper(tower, max_captures=2)

    def call(rows: int) -> None:
        x = torch.randn(rows, 32, device=device)
        cu_seqlens = lengths(0, rows, device=device)
        torch.testing.assert_close(wrapper(x, cu_seqlens), tower(x, cu_seqlens), rtol=0, atol=TOLERANCE)

    for rows in (3, 4, 3, 5):
        call(rows)
    assert (wrapper.captures, wrapper.num_captures) == (3, 2)
    call(3)
    assert wrapper.captures == 3
    call(4)
    assert (wrapper.captures, wrapper.num_captures) == (4, 2)


@torch.no_grad()
def with_the_last_capture_the_memory_goes_back(device: str) -> None:
    tower = make_tower(device, depth=1)
    own = BreakableCUDAGraphWrapper(tower, max_captures=1)
    shared = GraphPool(torch.device(device))
    sharing = BreakableCUDAGraphWrapper(tower, pool=shared)
    retired: list[GraphPool] = []
    original = GraphPool.retire
    try:
        GraphPool.retire = lambda pool: retired.append(pool) or original(pool)  # type: ignore[method-assign,func-returns-value]
        for wrapper in (own, sharing):
            for rows in (3, 4):
                wrapper(torch.randn(rows, 32, device=device), lengths(0, rows, device=device))
            wrapper.clear()
            assert wrapper.num_captures == 0
    finally:
        GraphPool.retire = original  # type: ignore[method-assign]
    assert len(retired) == 2
    assert shared not in retired
    x, cu_seqlens = torch.randn(3, 32, device=device), lengths(0, 3, device=device)
    for wrapper in (own, sharing):
        torch.testing.assert_close(wrapper(x, cu_seqlens), tower(x, cu_seqlens), rtol=0, atol=TOLERANCE)


class Reader(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


@torch.no_grad()
def what_cannot_be_captured_runs_eagerly_and_is_tried_once(device: str) -> None:
    calls: list[int] = []

    class Counts(Reader):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x.shape[0])
            return super().forward(x)

    wrapper, x = BreakableCUDAGraphWrapper(Counts().eval()), torch.ones(3, device=device)
    first = 2 if device == "cpu" else 4  # two warm-ups
    for number in range(3):
        assert torch.equal(wrapper(x * 2), x * 4)
        assert len(calls) == first + number
    ((reason, count),) = wrapper.misses.items()
    assert count == 3
    assert "at aten::_local_scalar_dense in Counts: " in reason
    assert (wrapper.hits, wrapper.captures, wrapper.num_captures) == (0, 0, 0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: float = 1.0, options: Any = None) -> dict[str, Any]:
        return {"y": self.linear(x) * factor, "factor": factor, "none": None}


@torch.no_grad()
def replaced_weights_are_captured_again(device: str) -> None:
    module = Scaled().to(device).eval()
    wrapper, x = BreakableCUDAGraphWrapper(module), torch.randn(2, 4, device=device)
    wrapper(x)
    module.linear.weight.mul_(2)
    torch.testing.assert_close(wrapper(x)["y"], module(x)["y"])
    assert wrapper.captures == 1
    module.linear.weight = nn.Parameter(torch.randn(4, 4, device=device))
    torch.testing.assert_close(wrapper(x)["y"], module(x)["y"])
    assert (wrapper.captures, wrapper.num_captures) == (2, 1)


CHECKS = [
    shapes_are_captured_once_and_replayed,
    the_one_that_was_used_longest_ago_makes_room,
    with_the_last_capture_the_memory_goes_back,
    what_cannot_be_captured_runs_eagerly_and_is_tried_once,
    replaced_weights_are_captured_again,
]
