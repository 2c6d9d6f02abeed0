"""Linear layers by measured kernels, with stand-ins and a clock that is made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.cli.inspection import class_rows
from fxsplit_encoder.kernels.choice import Chooser, KernelMeasurements, measuring
from fxsplit_encoder.kernels.meter import Measured
from fxsplit_encoder.kernels.products import measured
from fxsplit_encoder.kernels.products.measured import (
    ACTIVATIONS,
    KERNELS,
    Cublas,
    ProductKernel,
    ProductMeter,
    ProductShape,
    activate,
    interleaved,
    linear,
)

META, CPU = torch.device("meta"), torch.device("cpu")  # one that the tests would not touch, and one they do


def shape(rows: int = 48, *, device: torch.device = CPU, activation: str = "gelu") -> ProductShape:
    return ProductShape(device, torch.bfloat16, rows, 16, 8, True, activation)


class FakeKernel(Cublas):
    def __init__(self, name: str, change: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        self.name = name
        self._change = change
        self.calls = 0

    def __call__(self, *arguments: Any) -> Tensor:
        self.calls += 1
        return self._change(super().__call__(*arguments))


class Clock(ProductMeter):
    """Compares accuracy for real, on the CPU, and takes times from a table."""

    def __init__(self, kernels: tuple[FakeKernel, ...], **times: float) -> None:
        super().__init__(self._time)
        self._kernels, self._times = kernels, times
        self.measured: list[ProductShape] = []

    def can_measure(self, device: torch.device) -> bool:
        return True

    def measure(self, kernels: Any, shape: ProductShape) -> Measured:
        self.measured.append(shape)
        return super().measure(kernels, shape)

    def _time(self, call: Callable[[], object], shape: Any) -> float:
        before = [kernel.calls for kernel in self._kernels]
        call()
        (name,) = [k.name for k, n in zip(self._kernels, before, strict=True) if k.calls != n]
        return self._times[name]


def make() -> tuple[Chooser[ProductShape, ProductKernel], Clock]:
    kernels = (
        FakeKernel("base"),
        FakeKernel("fast"),
        FakeKernel("wrong", lambda out: out * 1.05),
        FakeKernel("fails", mock.Mock(side_effect=RuntimeError("no tile for it"))),
    )
    clock = Clock(kernels, base=10.0, fast=5.0, wrong=1.0, fails=1.0)
    return Chooser(KernelMeasurements(ProductShape, kernels, clock)), clock


def test_accuracy_comes_before_time_and_the_fastest_is_chosen() -> None:
    chooser, clock = make()
    assert chooser.ranking(shape())[0].name == "base"
    with measuring():
        assert [kernel.name for kernel in chooser.ranking(shape())] == ["fast", "base"]
        chooser.ranking(shape())
    assert chooser.ranking(shape(40))[0].name == "fast"  # the nearest that is known
    assert clock.measured == [shape()]
    (found,) = class_rows(CPU, chooser)
    assert found["shape"] == "bfloat16 16 to 8 + bias + gelu, rows 48"
    assert (found["chosen"], found["microseconds"]) == ("fast", {"base": 10.0, "fast": 5.0})
    rejected = chooser.measurements.table(CPU)[shape()].rejected
    assert rejected["wrong"].startswith("error 0.0")
    assert rejected["fails"] == "RuntimeError: no tile for it"


def test_the_chooser_decides_what_the_op_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser, _ = make()
    rows, weight = torch.randn(5, 16), torch.randn(8, 16)
    monkeypatch.setattr(measured, "CHOOSER", chooser)
    out = linear(rows, weight, None, "gelu")
    assert chooser.measurements.kernels[0].calls == 1
    torch.testing.assert_close(out, F.gelu(rows @ weight.t()))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.booleans(), st.sampled_from(ACTIVATIONS), st.booleans())
def test_the_op_is_a_linear_layer_and_its_activation(
    rows: int, with_bias: bool, activation: str, transposed: bool
) -> None:
    x = torch.randn(16, rows).t() if transposed else torch.randn(rows, 16)
    weight, bias = torch.randn(8, 16), torch.randn(8)
    expected = F.linear(x, weight, bias if with_bias else None)
    expected = {
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "swiglu": lambda y: F.silu(y[:, 0::2]) * y[:, 1::2],
    }[activation](expected)
    found = linear(x, weight, bias if with_bias else None, activation)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()


def test_the_operation_is_well_formed() -> None:
    rows, weight, bias = (torch.randn(*size) for size in ((5, 16), (8, 16), (8,)))
    for arguments in (
        (rows, weight, bias, "gelu"),
        (rows, weight, None, "gelu_tanh"),
        (rows, weight, bias, "swiglu"),
    ):
        torch.library.opcheck(linear, arguments, test_utils=("test_schema", "test_faketensor"))


def test_on_a_cpu_there_is_nothing_to_choose_from() -> None:
    assert class_rows(CPU, measured.CHOOSER) == []
    assert [kernel.name for kernel in KERNELS if kernel.supports(shape())] == ["cublas"]


def test_weights_come_from_memory_as_in_a_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timed call has another copy of the weight."""
    monkeypatch.setattr(measured, "num_copies", lambda weight: 3)
    (example,) = ProductMeter().examples(shape())
    seen: list[Tensor] = []

    class Watching(Cublas):
        def __call__(self, rows: Tensor, weight: Tensor, *others: Any) -> Tensor:
            seen.append(weight)
            return super().__call__(rows, weight, *others)

    call = example.timed(Watching())
    for _ in range(4):
        call()
    assert len(set(map(id, seen))) == 3
    assert seen[0] is seen[3] is example.arguments[1]
    assert torch.equal(seen[0], seen[1])


def test_the_copies_are_more_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    sizes = 1 << 26, 4352 * 1152, 1152 * 1152, 16
    weights = [mock.Mock(is_cuda=True, numel=lambda n=n: n, element_size=lambda: 2) for n in sizes]
    assert [*map(measured.num_copies, weights)] == [2, 8, 30, 32]


def test_two_layers_are_one_with_their_rows_in_turn() -> None:
    x, gate, up = torch.randn(5, 16), torch.randn(6, 16), torch.randn(6, 16)
    weight, bias = interleaved(gate, up), interleaved(gate[:, 0], up[:, 0])
    expected = F.silu(F.linear(x, gate, gate[:, 0])) * F.linear(x, up, up[:, 0])
    torch.testing.assert_close(activate(F.linear(x, weight, bias), "swiglu"), expected)
