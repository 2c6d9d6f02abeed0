"""The erf form of GELU as the tanh form, where 16 bits do not tell them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxsplit_encoder.compile.passes import run_passes
from fxsplit_encoder.compile.passes.fp8_linear import relative_rms
from fxsplit_encoder.compile.passes.gelu_epilogue import addmm_gelu
from fxsplit_encoder.compile.passes.tanh_gelu import tanh_gelu

from .aten_graphs import Mlp, aten_graph


@pytest.mark.parametrize("shape", [(70, 64), (3, 50, 64)], ids=["rows", "images"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_its_error_is_that_of_the_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = nn.Sequential(*(Mlp(F.gelu, 64, 256) for _ in range(4)))
    x = torch.randn(shape) * 3
    expected = exact(x)
    mlp = exact.to(dtype)
    eager = relative_rms(mlp(x.to(dtype)), expected)
    graph = aten_graph(mlp, x.to(dtype))
    changed = run_passes(graph.module, ("tanh_gelu", "gelu_epilogue"), "auto", torch.device("cpu"))
    assert changed == {"tanh_gelu": 4, "gelu_epilogue": 4}
    assert graph.count(addmm_gelu) == 4
    assert relative_rms(graph.run(), expected) <= 1.05 * eager


@pytest.mark.parametrize(
    "module",
    [
        Mlp(F.gelu),
        Mlp(F.gelu, bias=False).bfloat16(),
        Mlp(F.relu).bfloat16(),
        Mlp(lambda x: F.gelu(x, approximate="tanh")).bfloat16(),
        Mlp(lambda x: F.gelu(x) + x).bfloat16(),
    ],
    ids=["float32", "no bias", "another function", "the tanh form", "read twice"],
)
def test_others_stay(module: Any) -> None:
    x = torch.randn(7, 12, dtype=next(module.parameters()).dtype)
    graph = aten_graph(module, x)
    assert tanh_gelu(graph.module) == 0
    assert torch.equal(graph.run(), module(x))
