"""Which layers stay in the tower's dtype, by what fp8 adds to the results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.compile.passes import relative_rms
from fxsplit_encoder.compile.passes.fp8_linear import candidates, fp8_linear
from fxsplit_encoder.compile.precision import Interpreter, choose

from .passes.aten_graphs import Graph, Mlp, aten_graph

WIDTH = 64


class Tower(nn.Module):
    """An embedding, three MLPs on a residual stream, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(48, WIDTH)
        self.blocks = nn.ModuleList(Mlp(F.gelu, WIDTH, 128) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(self.norm(hidden))
        return self.head(self.norm(hidden))


@pytest.fixture
def tower() -> Tower:
    torch.manual_seed(0)
    return Tower().requires_grad_(False)


def traced(tower: Tower, dtype: torch.dtype = torch.float32) -> tuple[Graph, Interpreter]:
    torch.manual_seed(1)
    graph = aten_graph(tower.to(dtype), torch.randn(40, 48).to(dtype))
    return graph, Interpreter(graph.module, graph.args)


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "__defaults__", (WIDTH,))


def planted(tower: Tower) -> None:
    """Three large features whose contributions to one layer cancel, as massive activations do in trained
    towers; no other layer reads them.
    """
    tower.norm.weight[1:4] = 0.0
    tower.norm.bias[1:4] = torch.tensor([220.0, 150.0, 70.0])
    for block in tower.blocks:
        block.up.weight[:, 1:4] = 0.0
    tower.blocks[1].up.weight[:, 1:4] = torch.tensor([1.0, -1.0, -1.0])
    tower.head.weight[:, 1:4] = 0.0


def test_errors_are_those_of_each_layer_alone(tower: Tower) -> None:
    graph, interpreter = traced(tower)
    found = candidates(graph.module.graph)
    exact, errors = interpreter.errors(found)
    torch.testing.assert_close(exact, tower(graph.args[-1]))
    for number, error in enumerate(errors):
        alone, _ = traced(tower)
        assert fp8_linear(alone.module, kept=set(range(6)) - {number}) == 1
        assert relative_rms(alone.run(), exact) == pytest.approx(error, rel=1e-2)
    assert all(1e-4 < error < 0.05 for error in errors)


def test_within_the_limit_all_are_quantized_and_the_error_is_that_of_the_pass(tower: Tower) -> None:
    graph, interpreter = traced(tower)
    report = choose(interpreter, 1.0, {tower.blocks[0].up.weight.data_ptr(): "blocks.0.up.weight"})
    assert report.kept == ()
    assert [layer.name for layer in report.layers[:2]] == ["blocks.0.up.weight", ""]
    assert [(layer.in_features, layer.out_features) for layer in report.layers] == [(64, 128), (128, 64)] * 3
    exact = tower(graph.args[-1])
    fp8_linear(graph.module)
    assert report.fp8 == pytest.approx(relative_rms(graph.run(), exact), rel=1e-3)
    assert report.own < 1e-6


def test_the_largest_errors_are_kept_first(tower: Tower) -> None:
    _, interpreter = traced(tower)
    everything = choose(interpreter, math.inf, {})
    order = sorted(range(6), key=lambda n: -everything.layers[n].error)
    kept: list[int] = []
    for number in range(7):
        limit = math.sqrt(sum(everything.layers[n].error ** 2 for n in order[number:])) * 1.0001
        report = choose(interpreter, max(limit, 1e-12), {})
        assert sorted(report.kept) == sorted(order[: len(report.kept)])
        assert len(report.kept) >= number
        kept.append(len(report.kept))
    assert kept == sorted(kept)
    assert kept[0] < kept[3] < kept[6] == 6


def test_layers_that_add_more_together_than_their_squares_do_stay_too(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that all point the same way: six of 0.01 are 0.06 together, not 0.024."""
    _, interpreter = traced(tower)
    exact = torch.ones(4)

    def errors(self: Interpreter, layers: Any) -> Any:
        return exact, [0.01] * len(layers)

    monkeypatch.setattr(Interpreter, "errors", errors)
    monkeypatch.setattr(Interpreter, "run", lambda self, quantized=(): exact * (1 + 0.01 * len(quantized)))
    report = choose(interpreter, 0.0301, {})
    assert len(report.kept) == 3
    assert report.fp8 == pytest.approx(0.03, rel=1e-3)
    assert choose(interpreter, 0.009, {}).kept == tuple(range(6))


def test_planted_outliers_are_kept(tower: Tower) -> None:
    planted(tower)
    _, interpreter = traced(tower)
    report = choose(interpreter, math.inf, {})
    errors = [layer.error for layer in report.layers]
    assert max(range(6), key=errors.__getitem__) == 2
    assert errors[2] > 3 * sorted(errors)[-2]
    chosen = choose(interpreter, errors[2] / 2, {})
    assert chosen.kept == (2,)
    assert chosen.fp8 < report.fp8 / 2
    assert "1 of 6 layers stay in the tower's dtype: 2; relative error" in str(chosen)


def test_what_is_not_finite_is_kept(tower: Tower) -> None:
    tower.blocks[1].up.weight[0, 0] = float("nan")
    _, interpreter = traced(tower)
    report = choose(interpreter, 1.0, {})
    assert report.kept == tuple(range(6))


def test_a_tower_of_16_bits_has_its_own_error_beside(tower: Tower) -> None:
    _, interpreter = traced(tower, torch.bfloat16)
    report = choose(interpreter, 1.0, {})
    assert 1e-3 < report.own < report.fp8 < 0.2
    _, single = traced(tower.float())
    exact = choose(single, 1.0, {})
    for ours, theirs in zip(report.layers, exact.layers, strict=True):
        assert ours.error == pytest.approx(theirs.error, rel=0.1)


def test_it_is_the_same_every_time(tower: Tower) -> None:
    reports: list[Any] = [choose(traced(tower)[1], 0.01, {}) for _ in range(2)]
    assert reports[0] == reports[1]
