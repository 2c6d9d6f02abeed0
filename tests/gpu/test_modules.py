"""Modules that nobody wrapped, on the device: eager's results, whatever Dynamo hands over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxsplit_encoder.backend import BudgetDispatcher, dispatchers

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def siglip() -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    config = SiglipVisionConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=16,
    )
    return SiglipVisionModel(config).cuda().bfloat16().eval()


def new_dispatchers(before: set[int]) -> list[BudgetDispatcher]:
    return [d for d in dispatchers() if id(d) not in before]


@pytest.mark.parametrize("mode", ["full", "piecewise", "auto"])
@torch.no_grad()
def test_a_dense_tower_is_captured_by_its_batch(mode: str) -> None:
    tower, before = siglip(), {id(d) for d in dispatchers()}
    compiled = torch.compile(tower, backend="encoder_cg", dynamic=True, options={"mode": mode, "debug": True})
    for size in (3, 2, 5, 8, 3, 7, 1):
        pixels = torch.randn(size, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
        expected, output = tower(pixel_values=pixels), compiled(pixel_values=pixels)
        scale = expected.last_hidden_state.abs().max()
        assert (output.last_hidden_state - expected.last_hidden_state).abs().max() < 0.03 * scale
        scale = expected.pooler_output.abs().max()
        assert (output.pooler_output - expected.pooler_output).abs().max() < 0.05 * scale
    served = new_dispatchers(before)
    if mode != "auto":
        assert sum(d.hits for d in served) >= 5
    assert sum(d.hits + d.misses.total() for d in served) >= 7


class Odd(nn.Module):
    """Random numbers, a mutated buffer, a value read on the host, an untouched input, None and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        y = torch.nn.functional.dropout(self.linear(x), 0.5, self.training)
        if y.sum().item() > 1e9:
            y = y + 1
        return y.cumsum(0), x, None, x.shape[0]


@torch.no_grad()
def test_an_odd_module_gives_what_eager_gives() -> None:
    module = Odd().cuda().eval()
    compiled = torch.compile(module, backend="encoder_cg")
    for size in (4, 7, 4, 1, 9):
        x = torch.randn(size, 16, device="cuda")
        count = module.count.clone()
        output = compiled(x)
        assert module.count == count + 1
        expected = module(x)
        assert (output[0] - expected[0]).abs().max() < 1e-4
        assert output[1] is x
        assert output[2:] == (None, size)
