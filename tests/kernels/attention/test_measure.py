"""Accuracy before time, on the CPU with a clock that is made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fxsplit_encoder.kernels.attention import AttentionShape
from fxsplit_encoder.kernels.attention.chooser import AttentionMeter, example_lengths
from fxsplit_encoder.kernels.meter import Measured

from .fakes import FakeKernel, shapes

SMALL = AttentionShape(torch.device("cpu"), torch.bfloat16, 2, 8, 48, 24, 4)


def measure(*kernels: FakeKernel, of: AttentionShape = SMALL) -> Measured:
    def clock(call: Callable[[], object], shape: AttentionShape) -> float:
        call()
        return 7.0

    return AttentionMeter(clock).measure(kernels, of)


def one_row_times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda out: torch.cat([out[:5], out[5:6] * factor, out[6:]])


@pytest.mark.parametrize(
    "of",
    [SMALL, replace(SMALL, host_lengths=True), replace(SMALL, longest=12, host_lengths=True, equal=True)],
)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: out * 1.05, "error"),
        (lambda out: torch.zeros_like(out), "error 1"),
        (lambda out: out.roll(1, 0), "error"),
        (one_row_times(torch.nan), "error nan"),  # as one that was not written may be
        (one_row_times(0.9), "error"),
    ],
)
def test_what_is_not_accurate_has_no_time(change: Any, reason: str, of: AttentionShape) -> None:
    found = measure(FakeKernel("good"), FakeKernel("bad", change=change), FakeKernel("also good"), of=of)
    assert found.microseconds == {"good": 7.0, "also good": 7.0}
    assert list(found.rejected) == ["bad"]
    assert found.rejected["bad"].startswith(reason)


def test_rows_behind_the_last_segment_may_hold_anything() -> None:
    def spoil(out: Tensor) -> Tensor:
        return torch.cat([out[:42], torch.full_like(out[42:], float("nan"))])

    (full, spread) = AttentionMeter().examples(SMALL)
    assert (full.rows, spread.rows) == (48, 42)
    one = replace(SMALL, longest=40, segments=1)
    assert [example.rows for example in AttentionMeter().examples(one)] == [40, 40]
    assert measure(FakeKernel("good"), FakeKernel("spoils", change=spoil), of=one).rejected == {}


def test_the_first_kernel_must_be_accurate_as_well() -> None:
    found = measure(FakeKernel("bad", change=lambda out: out * 2), FakeKernel("good"))
    assert found.microseconds == {"good": 7.0}


class AwaitedKernel(FakeKernel):
    is_awaited = True


def test_what_other_processes_still_compile_comes_last_but_for_the_first() -> None:
    kernels = [AwaitedKernel("a"), FakeKernel("b"), AwaitedKernel("c"), AwaitedKernel("d"), FakeKernel("e")]
    assert list(measure(*kernels).microseconds) == ["a", "b", "e", "c", "d"]
    assert list(measure(*kernels[1:]).microseconds) == ["b", "e", "c", "d"]
    assert measure().microseconds == {}


def test_what_a_kernel_raises_or_its_clock_is_why_it_is_rejected() -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no engine for head_dim 8")

    found = measure(FakeKernel("good"), FakeKernel("bad", change=refuse))
    assert found.rejected == {"bad": "RuntimeError: no engine for head_dim 8"}
    assert AttentionMeter(refuse).measure([FakeKernel("any")], SMALL).rejected == {
        "any": "RuntimeError: no engine for head_dim 8"
    }


@pytest.mark.parametrize(("slow_us", "timed"), [(14.0, 2), (16.0, 1)])
def test_a_kernel_far_behind_is_timed_on_one_batch_alone(slow_us: float, timed: int) -> None:
    kernels = [FakeKernel("fast"), FakeKernel("slow")]
    timings: Counter[str] = Counter()

    def clock(call: Callable[[], object], shape: AttentionShape) -> float:
        before = len(kernels[1].calls)
        call()
        name = "fast" if len(kernels[1].calls) == before else "slow"
        timings[name] += 1
        return 10.0 if name == "fast" else slow_us

    found = AttentionMeter(clock).measure(kernels, SMALL)
    assert timings == {"fast": 2, "slow": timed}
    assert found.microseconds == {"fast": 10.0, "slow": slow_us}


@pytest.mark.parametrize("other", [{"tokens": 47}, {"longest": 20}, {"heads": 1}, {"host_lengths": True}])
def test_other_calls_are_measured_apart(other: dict[str, Any]) -> None:
    meter, kernel = AttentionMeter(lambda call, shape: 7.0), FakeKernel("any")
    meter.measure([kernel], SMALL)
    calls = len(kernel.calls)
    meter.measure([kernel], replace(SMALL, **other))
    assert len(kernel.calls) > calls


@settings(max_examples=100)
@given(shapes)
def test_examples_are_calls_of_their_shape(of: AttentionShape) -> None:
    lists = example_lengths(of)
    assert len(lists) == (1 if of.host_lengths else 2)
    for lengths in lists:
        assert len(lengths) == of.segments
        assert min(lengths) >= 0
        assert max(lengths) <= of.longest
        assert 0 < sum(length**2 for length in lengths) <= of.longest * of.tokens
        assert sum(lengths) <= of.tokens
    assert max(lists[0]) == of.longest
    if of.equal:
        assert set(lists[0]) == {of.longest}


def test_random_values_leave_the_programs_own_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again = (AttentionMeter().examples(SMALL)[0].arguments[0] for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, again)
    assert first.std() > 0.5
    assert not first.is_contiguous()
