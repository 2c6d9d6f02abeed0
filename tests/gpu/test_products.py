"""Every kernel of linear layers that is available here against float64, eagerly and captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.kernels import KernelMeasurements, describe, measuring, works
from fxsplit_encoder.products import ProductChooser, ProductShape
from fxsplit_encoder.products.choice import shape_of
from fxsplit_encoder.products.kernels import KERNELS, ProductKernel
from fxsplit_encoder.products.measure import ProductExample, ProductMeter

pytestmark = pytest.mark.gpu

# (bias, residual, activation)
EPILOGUES = ((True, False, "none"), (True, False, "gelu_tanh"), (True, True, "none"), (False, True, "none"))


def example(
    rows: int, in_features: int, out_features: int, epilogue: tuple[bool, bool, str]
) -> ProductExample:
    shape = ProductShape(
        torch.device("cuda", torch.cuda.current_device()),
        torch.bfloat16,
        *(rows, in_features, out_features),
        *epilogue,
    )
    return ProductMeter().examples(shape)[0]  # type: ignore[return-value]


def error(found: Tensor, each: ProductExample) -> float:
    bias = None if each.bias is None else each.bias.double()
    expected = F.linear(each.rows.double(), each.weight.double(), bias)
    expected = F.gelu(expected, approximate="tanh") if each.activation == "gelu_tanh" else expected
    expected = expected if each.residual is None else expected + each.residual.double()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize(
    "size", [(1, 1152, 3456), (196, 4352, 1152), (3136, 1152, 4304), (77, 1152, 1152)], ids=str
)
@torch.no_grad()
def test_no_kernel_errs_more_than_torch_eagerly_and_captured(
    size: tuple[int, int, int], epilogue: tuple[bool, bool, str], kernel: ProductKernel
) -> None:
    each = example(*size, epilogue)
    arguments = (each.rows, each.weight, each.bias, each.residual, each.activation)
    if not works(kernel, shape_of(*arguments)):
        pytest.skip(f"{kernel.name}: {kernel.unavailable_reason(each.rows.device) or 'another epilogue'}")
    limit = 1.1 * error(KERNELS[0](*arguments), each)
    for _ in range(2):
        assert error(kernel(*arguments), each) <= limit
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*arguments)
    for factor in (0.5, -1.0):
        each.rows.mul_(factor)
        if each.residual is not None:
            each.residual.mul_(factor)
        out.fill_(float("nan"))
        graph.replay()
        assert error(out, each) <= 1.1 * error(KERNELS[0](*arguments), each)


@pytest.mark.alone
def test_measuring_finds_times_of_all_that_are_there_and_keeps_them(tmp_path: Path) -> None:
    def measurements() -> KernelMeasurements[ProductShape, ProductKernel]:
        return KernelMeasurements(ProductShape, KERNELS, ProductMeter()).keep(tmp_path)

    first = measurements()
    each = example(3136, 4352, 1152, (True, True, "none"))
    chooser = ProductChooser(measurements=first)
    with measuring():
        chosen = chooser.of(each.rows, each.weight, each.bias, each.residual, each.activation)
    (found,) = describe(each.rows.device, chooser).classes
    assert {"cublas", "cublas_accumulating"} <= found.microseconds.keys(), found.rejected
    assert found.chosen == chosen.name
    assert measurements().table(each.rows.device) == first.table(each.rows.device)
