from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.pad_mlp_width import pad_mlp_width

from .aten_graphs import Graph, Mlp, Using, aten_graph, rewritten, tanh_gelu

ACTIVATIONS = {
    "gelu": tanh_gelu,
    "silu": F.silu,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "1 at 0": lambda x: torch.cos(x) + 1,
    "in float32": lambda x: F.silu(x.float()).to(x.dtype),
    "of images": lambda x: F.relu(x.unflatten(0, (-1, 1))).flatten(0, 1),
}


def widths(graph: Graph) -> set[int]:
    """The sizes of the derived parameters that are padded."""
    return {max(node.meta["val"].shape) for node in graph.derived}


@pytest.mark.parametrize("shape", [(7, 12), (3, 5, 12)], ids=["rows", "images"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_padded_mlp_gives_the_same(gated: bool, bias: bool, shape: tuple[int, ...]) -> None:
    graph = rewritten(pad_mlp_width, Mlp(F.silu, gated=gated, bias=bias), torch.randn(shape))
    assert widths(graph) == {128}
    assert len(graph.derived) == (2 + gated if not bias else 3 + 2 * gated)


@settings(max_examples=12)
@given(st.integers(1, 40).map(lambda n: 8 * n), st.sampled_from(sorted(ACTIVATIONS)), st.booleans())
def test_only_widths_that_need_little_are_padded(hidden: int, name: str, gated: bool) -> None:
    padded = -(-hidden // 128) * 128
    pays = padded != hidden and padded - hidden <= hidden / 8
    mlp = Mlp(ACTIVATIONS[name], hidden=hidden, gated=gated)
    graph = rewritten(pad_mlp_width, mlp, torch.randn(3, 12), times=int(pays))
    assert widths(graph) == ({padded} if pays else set())


class Merged(nn.Module):
    """Gates and what they gate in one layer, as vLLM has them; its result is cut in several ways."""

    def __init__(self, cut: Callable[[Tensor], Any], *, parts: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(12, 120 * parts, bias=bias)
        self.down = nn.Linear(120, 12, bias=bias)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        gate, *others = self.cut(self.gate_up(x))
        hidden = F.silu(gate)
        for other in others:
            hidden = hidden * other
        return self.down(hidden)


CUTS: dict[str, Callable[[Tensor], Any]] = {
    "slices from the end": lambda x: (x[..., -120:], x[..., :-120]),
    "chunks": lambda x: x.chunk(2, dim=-1),
    "sizes": lambda x: x.split([120, 120], dim=-1),
    "rows of two": lambda x: x.unflatten(-1, (2, 120)).unbind(-2),
    "one part twice": lambda x: (x[..., 120:], x[..., 120:]),
}


HALVES = Merged(CUTS["chunks"])


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 12), (7, 1, 12)])
def test_gates_and_what_they_gate_may_be_one_layer(name: str, bias: bool, shape: tuple[int, ...]) -> None:
    graph = rewritten(pad_mlp_width, Merged(CUTS[name], bias=bias), torch.randn(shape))
    assert widths(graph) == {128, 256}


@pytest.mark.parametrize("shape", [(7, 12), (7, 1, 12)])
@pytest.mark.parametrize(
    "mlp",
    [
        Using(HALVES, lambda mlp, x: mlp.down(mlp.gate_up(x)[..., 120:])),
        Mlp(lambda x: x),
        Merged(lambda x: x.chunk(3, dim=-1), parts=3, bias=True),
    ],
    ids=["one part", "all of it", "three parts"],
)
def test_what_a_layer_gives_may_be_read_in_other_ways(mlp: nn.Module, shape: tuple[int, ...]) -> None:
    rewritten(pad_mlp_width, mlp, torch.randn(shape))


def read_twice(mlp: Any, x: Tensor) -> Tensor:
    hidden = F.relu(mlp.up(x))
    return mlp.down(hidden) + hidden[:, :12]


PLAIN = Mlp(F.relu)
OTHERS = {
    "1 / 0": Mlp(torch.reciprocal),
    "log 0": Mlp(torch.log),
    "softmax": Mlp(lambda x: x.softmax(-1)),
    "shuffled": Mlp(lambda x: x.view(-1, 2, 60).transpose(1, 2).reshape(-1, 120)),
    "read twice": Using(PLAIN, read_twice),
    "normalized": Mlp(lambda x: F.layer_norm(x, (120,))),
    "a feature's": Using(PLAIN, lambda mlp, x: mlp.down(mlp.up(x) * mlp.up.bias)),
    "a row's": Using(PLAIN, lambda mlp, x: mlp.down(F.relu(mlp.up(x)) * x[:, :1])),
    "between parts": Merged(lambda x: (x[..., 60:180],)),
    "every other": Merged(lambda x: (x[..., ::2],)),
    "rows of parts": Merged(lambda x: (x.view(-1, 120).view(2, -1, 120)[0],)),
    "interleaved": Merged(lambda x: (x.view(-1, 120, 2).select(-1, 0),)),
    "some rows": Merged(lambda x: x[1:4].chunk(2, dim=-1)),
}


@pytest.mark.parametrize("module", OTHERS.values(), ids=OTHERS)
def test_others_stay(module: nn.Module) -> None:
    rewritten(pad_mlp_width, module, torch.randn(7, 12), times=0, equal_nan=True)


def rows_in_another_order(mlp: Any, x: Tensor) -> Tensor:
    gate, up = (part.transpose(0, 1) for part in mlp.gate_up(x).chunk(2, dim=-1))
    return mlp.down(F.silu(gate) * up)


def by_a_given_factor(mlp: Any, x: Tensor, factor: Tensor) -> Tensor:
    return mlp.down(F.relu(mlp.up(x)) * factor)


@pytest.mark.parametrize(
    ("mlp", "function", "shapes"),
    [(HALVES, rows_in_another_order, [(7, 3, 12)]), (PLAIN, by_a_given_factor, [(7, 12), (7, 120)])],
)
def test_others_of_other_inputs_stay(mlp: nn.Module, function: Any, shapes: list[tuple[int, ...]]) -> None:
    rewritten(pad_mlp_width, Using(mlp, function), *map(torch.randn, shapes), times=0)


def test_a_weight_that_is_no_parameter_stays() -> None:
    graph = aten_graph(
        lambda x, up, down: F.linear(F.relu(F.linear(x, up)), down),
        torch.randn(7, 12),
        torch.randn(120, 12),
        torch.randn(12, 120),
    )
    assert pad_mlp_width(graph.module) == 0
