"""Functions of entries on a CPU give an entry the same bits wherever it is in a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.compile.pieces import filled_up, in_whole_vectors
from tests.compile.passes.aten_graphs import aten_graph

aten = torch.ops.aten

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "power": lambda x: aten.pow.Tensor_Scalar(x.abs(), 0.7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_entry_has_the_same_bits_at_any_place(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = filled_up(function, values)
    torch.testing.assert_close(together, function(values))
    for count in (1, 7, 15, 17, 63, 65, 500):
        assert torch.equal(filled_up(function, values[:count]), together[:count])
        assert torch.equal(filled_up(function, values[-count:]), together[-count:])


def test_layouts_are_those_of_the_function_itself() -> None:
    x = torch.randn(3, 5, 7)
    for value in (x, x.transpose(0, 2), x.permute(1, 0, 2), x[:, :, 3:4], torch.tensor(0.5), x[:0]):
        got, expected = filled_up(torch.sin, value), torch.sin(value)
        assert (got.shape, got.stride()) == (expected.shape, expected.stride())
        torch.testing.assert_close(got, expected)


def test_several_tensors_and_dtypes() -> None:
    x, y = torch.rand(5, 7) + 0.5, torch.rand(7) + 0.5
    torch.testing.assert_close(filled_up(torch.pow, x, y), torch.pow(x, y))
    torch.testing.assert_close(filled_up(torch.atan2, y, x), torch.atan2(y, x))
    assert filled_up(torch.isfinite, x).dtype == torch.bool


def test_functions_of_a_graph_are_filled_up_and_arithmetic_stays() -> None:
    def forward(x: Tensor) -> Tensor:
        return (x * 2 + 1).exp().masked_fill(x > 0, 3.0)

    x = torch.randn(5, 3)
    graph = aten_graph(forward, x)
    in_whole_vectors(graph.module)
    assert graph.count(aten.exp.default) == 0
    assert graph.count(aten.mul.Tensor) == 1
    torch.testing.assert_close(graph.module(x)[0], forward(x))
