from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.compile.passes.folded_adapters import folded_adapters
from fxsplit_encoder.compile.passes.merged_projections import merged_projections

from .aten_graphs import aten_graph

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


class Others(nn.Module):
    """What only looks like an adapter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.base, self.down, self.up = nn.Linear(32, 48), nn.Linear(32, 4, bias=False), nn.Linear(4, 48)
        self.parts_down, self.parts_up = nn.Linear(32, 12, bias=False), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        result, rows = self.base(x), x.flip(0) if self.kind == "other rows" else x
        between = self.down(rows)
        if self.kind == "a function between":
            between = between.relu()
        added = self.up(between) * (x[:, :1] if self.kind == "a scale for each row" else 0.5)
        if self.kind == "parts of rows":
            return result.view(-1, 16) + self.parts_up(self.parts_down(rows).view(-1, 4)) * 0.5
        if self.kind == "the layer is read elsewhere":
            return result + added + result.relu()
        if self.kind == "the adapter is read elsewhere":
            return result + added + added.relu()
        return torch.add(result, added, alpha=2) if self.kind == "a factor" else result + added


@pytest.mark.parametrize(
    "kind",
    [
        *("other rows", "a function between", "a scale for each row", "a factor"),
        *("the layer is read elsewhere", "the adapter is read elsewhere", "parts of rows"),
    ],
)
def test_what_is_no_adapter_stays(kind: str) -> None:
    module, x = Others(kind), torch.randn(5, 32)
    graph = aten_graph(module, x)
    assert graph.apply(folded_adapters) == 0
    torch.testing.assert_close(graph.run(), module(x))


class Attention(nn.Module):
    """Queries, keys and values with adapters, whose layers the next pass makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = Adapted(4), Adapted(4), Adapted(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, -1, 3, 16).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v)


@torch.no_grad()
def test_other_passes_see_layers_without_adapters() -> None:
    module, x = Attention(), torch.randn(2, 6, 32)
    graph = aten_graph(module, x)
    assert (graph.apply(folded_adapters), graph.apply(merged_projections)) == (3, 1)
    assert graph.count(aten.addmm.default) == 1
    torch.testing.assert_close(graph.run(), module(x))
