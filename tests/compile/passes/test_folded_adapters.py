from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.folded_adapters import folded_adapters
from fxsplit_encoder.compile.passes.merged_projections import merged_projections

from .aten_graphs import Batched, Using, aten_graph, by_torch, rewritten

aten = torch.ops.aten


class Adapted(nn.Module):
    """A linear layer with low-rank parts, as PEFT computes them."""

    def __init__(
        self, *ranks: int, bias: bool = True, biases: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        torch.manual_seed(len(ranks))
        self.base = nn.Linear(32, 48, bias=bias, dtype=dtype)
        self.down = nn.ModuleList(nn.Linear(32, rank, bias=False) for rank in ranks)
        self.up = nn.ModuleList(nn.Linear(rank, 48, bias=biases) for rank in ranks)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for scale, (down, up) in enumerate(zip(self.down, self.up, strict=True), 1):
            x = x.to(down.weight.dtype)
            result = result + up(down(x)) * (scale / 2)
        return result.to(self.base.weight.dtype)


def float64(module: nn.Module, x: Tensor) -> Tensor:
    """What a module computes in float64, of the weights that it has."""
    return module.double()(x.double())


@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32)])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"biases": True}], ids=["plain", "no bias", "biases of adapters"]
)
@pytest.mark.parametrize("ranks", [(4,), (4, 2)])
@torch.no_grad()
def test_adapters_become_part_of_the_weight(
    ranks: tuple[int, ...], options: dict[str, bool], shape: tuple[int, ...]
) -> None:
    layer, x = Adapted(*ranks, **options), torch.randn(*shape)
    graph = aten_graph(layer, x)
    assert graph.apply(folded_adapters) == len(ranks)
    assert graph.count(aten.mm.default) + graph.count(aten.addmm.default) == 1
    assert not graph.count(aten.mul.Tensor)
    torch.testing.assert_close(graph.run(), layer(x))
    assert folded_adapters(graph.module) == 0


@torch.no_grad()
def test_nothing_is_left_of_two_adapters_in_float32() -> None:
    layer: Any = Adapted(4, 2, dtype=torch.bfloat16)
    layer.down.float()
    layer.up.float()
    graph = aten_graph(layer, torch.randn(5, 32).bfloat16())
    assert graph.apply(folded_adapters) == 2
    assert not graph.count(aten._to_copy.default) and not graph.count(aten.add.Tensor)


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.003, 0.03, 0.3])
@torch.no_grad()
def test_16_bits_are_as_close_to_float64_as_eager(share: float, adapters: torch.dtype) -> None:
    torch.manual_seed(0)
    layer: Any = Adapted(16, dtype=torch.bfloat16)
    layer.base, layer.down[0], layer.up[0] = (
        nn.Linear(*sizes, bias=False) for sizes in ((512, 512), (512, 16), (16, 512))
    )
    nn.init.normal_(layer.base.weight, std=0.02)
    product = layer.up[0].weight @ layer.down[0].weight / 2
    layer.up[0].weight.mul_(share * layer.base.weight.norm() / product.norm())
    layer.base.bfloat16()
    layer.down.to(adapters)
    layer.up.to(adapters)
    x = torch.randn(64, 512).bfloat16()
    graph = aten_graph(layer, x)
    assert graph.apply(folded_adapters) == 1
    assert not graph.count(aten._to_copy.default)
    got, eager = graph.run(), layer(x)
    exact = float64(layer, x)
    errors = [float((each.double() - exact).norm()) for each in (got, eager)]
    assert errors[0] <= 1.05 * errors[1]


def parts_of_rows(module: Any, x: Tensor) -> Tensor:
    return module.base(x).view(-1, 12) + module.up(module.down(x).view(-1, 4)) * 0.5


OTHERS: dict[str, Callable[..., Tensor]] = {
    "other rows": lambda m, x: m.base(x) + m.up(m.down(x.flip(0))) * 0.5,
    "a function between": lambda m, x: m.base(x) + m.up(m.down(x).relu()) * 0.5,
    "a scale for each row": lambda m, x: m.base(x) + m.up(m.down(x)) * x[:, :1],
    "a factor": lambda m, x: torch.add(m.base(x), m.up(m.down(x)) * 0.5, alpha=2),
    "the layer is read elsewhere": lambda m, x: (made := m.base(x)) + m.up(m.down(x)) * 0.5 + made.relu(),
    "the adapter is read elsewhere": lambda m, x: m.base(x) + (own := m.up(m.down(x)) * 0.5) + own.relu(),
}


class Adapter(nn.Module):
    """Layers of which functions make what only looks like an adapter."""

    def __init__(self, rank: int = 4, features: int = 48) -> None:
        super().__init__()
        self.base, self.up = nn.Linear(32, 48), nn.Linear(4, features)
        self.down = nn.Linear(32, rank, bias=False)


@pytest.mark.parametrize(
    ("layers", "function"),
    [*((Adapter(), function) for function in OTHERS.values()), (Adapter(16, 12), parts_of_rows)],
    ids=[*OTHERS, "parts of rows"],
)
def test_what_is_no_adapter_stays(layers: nn.Module, function: Callable[..., Tensor]) -> None:
    rewritten(folded_adapters, Using(layers, function), torch.randn(5, 32), times=0)


@torch.no_grad()
def test_other_passes_see_layers_without_adapters() -> None:
    module, x = Batched(by_torch, head_dim=24), torch.randn(2, 6, 32)
    module.q, module.k, module.v = Adapted(4), Adapted(4), Adapted(2)
    graph = aten_graph(module, x)
    assert (graph.apply(folded_adapters), graph.apply(merged_projections)) == (3, 1)
    assert graph.count(aten.addmm.default) == 2  # with the layer behind attention
    torch.testing.assert_close(graph.run(), module(x))
