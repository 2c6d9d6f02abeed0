"""Statistics and warm-ups of whatever serves."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.runtime.statistics import BudgetStats, CaptureKey, ManagerStats
from tests.manager.test_passes import tower as padded_tower

OPTIONS: Any = {"token_budgets": [8, 16], "mode": "full", "piece_compiler": "eager"}


def attention(x: torch.Tensor) -> torch.Tensor:
    """(batch, rows, 16) to the same."""
    heads = x.unflatten(2, (2, 8)).transpose(1, 2)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return x + attended.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(attention(x))  # type: ignore[no-any-return]


def test_a_manager_is_counted_and_warmed_up(tiny_towers: Any, make_batch: Any) -> None:
    config = fx.EncoderConfig(mode="breakable", token_budgets=[8, 32])
    manager = fx.EncoderCudaGraphManager(tiny_towers.wrapped, config, log_interval=0)
    assert fx.warmup(manager) == 2
    manager.execute(make_batch([(1, 4, 4), (1, 4, 8), (1, 2, 6)]))
    assert fx.stats(manager) == manager.stats()
    assert (fx.stats(manager).hits, fx.stats(manager).items) == (3, 3)


@torch.no_grad()
def test_calls_of_a_compiled_module_are_its_items(fresh_dynamo: None) -> None:
    first, second = (torch.compile(Layer(), backend="encoder_cg", options=OPTIONS) for _ in range(2))
    function, copied = torch.compile(attention, backend="encoder_cg", options=OPTIONS), copy.deepcopy(first)
    for compiled in (first, first, function, copied):
        compiled(torch.randn(3, 4, 16))
    counted = [fx.stats(each).items for each in (first, second, function, copied)]
    assert counted == [2, 0, 1, 1]
    stats = fx.stats(first)
    assert stats.hits + sum(stats.misses.values()) == 2
    assert sum(stats.fallback_runs.values()) == sum(stats.misses.values())
    gc.collect()
    assert fx.stats(first).items == 2


def test_statistics_add_up() -> None:
    key, other = CaptureKey("default", 8), CaptureKey("default", 16)
    first = ManagerStats(
        1, {MissReason.OPTIONS: 1}, {key: BudgetStats(1, 5, 3, mode="full")}, {"eager": 1}, 10
    )
    second = ManagerStats(2, {}, {key: BudgetStats(2, 8, 8), other: BudgetStats(1, 16, 0)}, {"exact": 1}, 5)
    assert ManagerStats.total([first, second]) == ManagerStats(
        3,
        {MissReason.OPTIONS: 1},
        {key: BudgetStats(3, 13, 11, mode="full"), other: BudgetStats(1, 16, 0)},
        {"eager": 1, "exact": 1},
        15,
    )
    assert ManagerStats.total([]) == ManagerStats(0, {}, {})
    assert list(first.under("visual").budgets) == [CaptureKey("visual default", 8)]


@pytest.mark.parametrize("target", [nn.Linear(2, 2), 3, "a path"])
def test_what_serves_nothing_is_refused(target: Any) -> None:
    with pytest.raises(fx.InputError, match="stats: expected a model after accelerate"):
        fx.stats(target)
    with pytest.raises(fx.InputError, match="makes no example inputs"):
        fx.warmup(target)


@torch.no_grad()
def test_after_refresh_the_next_call_has_weights_that_were_written_anyhow(fresh_dynamo: None) -> None:
    tower, grid = padded_tower(0), torch.tensor([[1, 4, 6]])
    pixels = torch.randn(24, fx.wrap(tower).patch_features)
    settings = {"token_budgets": (8,), "passes": ("pad_mlp_width",), "piece_compiler": "eager"}
    fx.accelerate(tower, settings)
    tower(pixels, grid)
    weight = tower.blocks[0].mlp.linear_fc2.weight
    weight.data[0, 1] += 100  # no sample, and no version
    fx.refresh(tower)
    expected = padded_tower(0)
    expected.load_state_dict(tower.state_dict())
    torch.testing.assert_close(
        tower(pixels, grid).pooler_output, expected(pixels, grid).pooler_output, rtol=1e-4, atol=1e-4
    )
    assert fx.stats(tower).misses == {}
    with pytest.raises(fx.InputError, match=r"refresh: expected a model after accelerate\(\), a manager"):
        fx.refresh(expected)
