from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.compile.passes.gelu_epilogue import addmm_gelu, gelu_epilogue
from fxsplit_encoder.compile.passes.pad_mlp_width import pad_columns, pad_mlp_width, pad_rows

from .aten_graphs import Mlp, aten_graph


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": tanh_gelu,
    "silu": F.silu,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "1 at 0": lambda x: torch.cos(x) + 1,
    "in float32": lambda x: F.silu(x.float()).to(x.dtype),
    "of images": lambda x: F.relu(x.unflatten(0, (-1, 1))).flatten(0, 1),
}


def widths(graph: Any) -> set[int]:
    """The sizes of the derived parameters that are padded."""
    return {max(node.meta["val"].shape) for node in graph.derived}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_the_padded_mlp_gives_the_same(name: str, gated: bool) -> None:
    mlp, x = Mlp(ACTIVATIONS[name], gated=gated), torch.randn(7, 12)
    graph = aten_graph(mlp, x)
    assert pad_mlp_width(graph.module) == 1
    assert widths(graph) == {128}
    assert len(graph.derived) == (5 if gated else 3)
    torch.testing.assert_close(graph.run(), mlp(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_images_of_rows(gated: bool, bias: bool) -> None:
    mlp, x = Mlp(F.silu, gated=gated, bias=bias), torch.randn(3, 5, 12)
    graph = aten_graph(mlp, x)
    assert pad_mlp_width(graph.module) == 1
    torch.testing.assert_close(graph.run(), mlp(x))


@settings(max_examples=12)
@given(st.integers(1, 40).map(lambda n: 8 * n), st.sampled_from(sorted(ACTIVATIONS)), st.booleans())
def test_only_widths_that_need_little_are_padded(hidden: int, name: str, gated: bool) -> None:
    mlp, x = Mlp(ACTIVATIONS[name], hidden=hidden, gated=gated), torch.randn(3, 12)
    graph = aten_graph(mlp, x)
    padded = -(-hidden // 128) * 128
    pays = padded != hidden and padded - hidden <= hidden / 8
    assert pad_mlp_width(graph.module) == int(pays)
    assert widths(graph) == ({padded} if pays else set())
    torch.testing.assert_close(graph.run(), mlp(x))


class ReadTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.up(x))
        return self.down(hidden) + hidden[:, :12]


class Normalized(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.layer_norm(self.up(x), (120,)))


class PerFeature(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.up.bias)


class RowFactor(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)) * x[:, :1])


@pytest.mark.parametrize(
    "module",
    [
        Mlp(torch.reciprocal),
        Mlp(torch.log),
        Mlp(lambda x: x.softmax(-1)),
        Mlp(lambda x: x.view(-1, 2, 60).transpose(1, 2).reshape(-1, 120)),
        ReadTwice(F.relu),
        Normalized(F.relu),
        PerFeature(F.relu),
        RowFactor(F.relu),
    ],
    ids=["1 / 0", "log 0", "softmax", "shuffled", "read twice", "normalized", "a feature's", "a row's"],
)
def test_others_stay(module: Any) -> None:
    x = torch.randn(7, 12)
    graph = aten_graph(module, x)
    assert pad_mlp_width(graph.module) == 0
    assert not graph.derived
    torch.testing.assert_close(graph.run(), module(x), equal_nan=True)


def test_a_weight_that_is_no_parameter_stays() -> None:
    graph = aten_graph(
        lambda x, up, down: F.linear(F.relu(F.linear(x, up)), down),
        torch.randn(7, 12),
        torch.randn(120, 12),
        torch.randn(12, 120),
    )
    assert pad_mlp_width(graph.module) == 0


def test_then_the_gelu_is_fused() -> None:
    mlp, x = Mlp(tanh_gelu), torch.randn(7, 12)
    graph = aten_graph(mlp, x)
    assert pad_mlp_width(graph.module) == gelu_epilogue(graph.module) == 1
    (fused,) = graph.module.graph.find_nodes(op="call_function", target=addmm_gelu)
    assert fused.meta["val"].shape[1] == 128
    torch.testing.assert_close(graph.run(), mlp(x))


def test_padding_appends_zeros() -> None:
    matrix, vector = torch.randn(3, 4), torch.randn(3)
    assert torch.equal(pad_rows(matrix, 5), torch.cat([matrix, torch.zeros(2, 4)]))
    assert torch.equal(pad_rows(vector, 5), torch.cat([vector, torch.zeros(2)]))
    assert torch.equal(pad_columns(matrix, 6), torch.cat([matrix, torch.zeros(3, 2)], dim=1))
