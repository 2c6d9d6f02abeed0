from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.activations import addmm_gelu, gelu_epilogue

from .aten_graphs import Mlp, Using, rewritten, tanh_gelu

ADDMM, GELU = torch.ops.aten.addmm.default, torch.ops.aten.gelu.default


@pytest.mark.parametrize("shape", [(7, 12), (3, 5, 12)], ids=["rows", "images"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_and_its_tanh_gelu_become_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    graph = rewritten(gelu_epilogue, Mlp(tanh_gelu).to(dtype), x, rtol=0, atol=0)
    assert (graph.count(addmm_gelu), graph.count(ADDMM), graph.count(GELU)) == (1, 1, 0)


def summed_before(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down(tanh_gelu(torch.addmm(x.repeat(1, 10), x, mlp.up.weight.t())))


OTHERS = {
    "erf": Mlp(F.gelu),
    "another function": Mlp(F.relu),
    "no bias": Mlp(tanh_gelu, bias=False),
    "read twice": Mlp(lambda hidden: tanh_gelu(hidden) + hidden),
    "another sum": Using(Mlp(tanh_gelu), summed_before),
}


@pytest.mark.parametrize("module", OTHERS.values(), ids=OTHERS)
def test_others_stay(module: nn.Module) -> None:
    rewritten(gelu_epilogue, module, torch.randn(7, 12), times=0)


def test_the_operation_is_well_formed() -> None:
    inputs = (torch.randn(8), torch.randn(5, 6), torch.randn(8, 6).t())
    torch.library.opcheck(addmm_gelu, inputs, test_utils=("test_schema", "test_faketensor"))
