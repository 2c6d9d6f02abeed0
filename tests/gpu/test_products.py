"""Every kernel of linear layers that is available here against float64, eagerly and captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.cli.inspection import class_rows
from fxsplit_encoder.kernels.choice import Chooser, KernelMeasurements, kept, measuring
from fxsplit_encoder.kernels.kernel import works
from fxsplit_encoder.kernels.products import measured
from fxsplit_encoder.kernels.products.measured import (
    ACTIVATIONS,
    KERNELS,
    ProductKernel,
    ProductMeter,
    ProductShape,
    linear,
    shape_of,
)

from .support import captured

pytestmark = pytest.mark.gpu

EPILOGUES = (
    *((True, name) for name in ACTIVATIONS),
    *((False, name) for name in ("gelu_tanh", "swiglu")),
)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x[:, ::2]) * x[:, 1::2],
}


Arguments = tuple[Tensor, Tensor, Tensor | None, str]


def example(rows: int, in_features: int, out_features: int, epilogue: tuple[bool, str]) -> Arguments:
    device = torch.device("cuda", torch.cuda.current_device())
    shape = ProductShape(device, torch.bfloat16, rows, in_features, out_features, *epilogue)
    return ProductMeter().examples(shape)[0].arguments  # type: ignore[return-value]


def error(found: Tensor, arguments: Arguments) -> float:
    rows, weight, bias, activation = arguments
    expected = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    expected = FUNCTIONS[activation](expected)
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize(
    "size", [(1, 1152, 3456), (196, 4352, 1152), (3136, 1152, 4304), (277, 1152, 1152)], ids=str
)
@torch.no_grad()
def test_no_kernel_errs_more_than_torch_eagerly_and_captured(
    size: tuple[int, int, int], epilogue: tuple[bool, str], kernel: ProductKernel
) -> None:
    arguments = example(*size, epilogue)
    rows = arguments[0]
    if not works(kernel, shape_of(*arguments)):
        pytest.skip(f"{kernel.name}: {kernel.unavailable_reason(rows.device) or 'another shape'}")
    limit = 1.1 * error(KERNELS[0](*arguments), arguments)
    for _ in range(2):
        assert error(kernel(*arguments), arguments) <= limit
    graph, out = captured(lambda: kernel(*arguments))
    for factor in (0.5, -1.0):
        rows.mul_(factor)
        out.fill_(float("nan"))
        graph.replay()
        assert error(out, arguments) <= 1.1 * error(KERNELS[0](*arguments), arguments)


@torch.no_grad()
def test_torch_is_as_fast_by_the_op_as_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op launches what Inductor would for such a layer, no kernel more."""
    rows, weight, bias, _ = example(196, 4352, 1152, (True, "gelu"))
    only = KernelMeasurements(ProductShape, KERNELS[:1], ProductMeter())
    monkeypatch.setattr(measured, "CHOOSER", Chooser(only))
    assert kernels_of(lambda: linear(rows, weight, bias, "gelu")) == kernels_of(
        lambda: F.gelu(torch.addmm(bias, rows, weight.t()))
    )


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of the device's kernels that a call launches."""
    call()  # what it loads and plans is not its kernels
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert names
    return names


@pytest.mark.alone
def test_measuring_finds_times_of_all_that_are_there_and_keeps_them(tmp_path: Path) -> None:
    pytest.importorskip("quack")  # alone, cuBLAS is not measured

    def measurements() -> KernelMeasurements[ProductShape, ProductKernel]:
        return KernelMeasurements(ProductShape, KERNELS, ProductMeter(), partial(kept, directory=tmp_path))

    first = measurements()
    arguments = example(3136, 4352, 1152, (True, "gelu"))
    device = arguments[0].device
    chooser = Chooser(first)
    with measuring():
        chosen = chooser.ranking(shape_of(*arguments))[0]
    (found,) = class_rows(device, chooser)
    assert "cublas" in found["microseconds"], found
    assert found["chosen"] == chosen.name
    assert measurements().table(device) == first.table(device)
