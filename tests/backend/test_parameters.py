"""Which changes of a compiled tower's parameters and blocks are noticed, and when."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.backend import forward as parameters
from fxsplit_encoder.compile.blocks import ChangedBlocksError, LiveWeights
from fxsplit_encoder.errors import WeightsLayoutError
from tests.small_tower import SmallAdapter

from .towers import assert_equal_features, compiled, features

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def replace_block(inner: Any) -> None:
    block = copy.deepcopy(inner.blocks[1])
    block.norm1.weight.mul_(3)
    inner.blocks[1] = block


def replace_layer(inner: Any) -> None:
    layer = inner.blocks[1].mlp.linear_fc1
    inner.blocks[1].mlp.linear_fc1 = nn.Linear(layer.in_features, layer.out_features).requires_grad_(False)


@pytest.mark.slow
def test_changed_blocks_are_traced_again(small: Any, few_pixels: Tensor, inlined: list[int]) -> None:
    """By every compiled module of the tower. tests/_torch/test_structure.py shows what counts as a change."""
    tower = SmallAdapter(small)
    modules = [compiled(tower), compiled(tower, token_budgets=[16])]
    before, _ = (features(module, few_pixels) for module in modules)
    with torch.no_grad():
        replace_block(small)
    for module in (*modules, *modules):
        assert_equal_features(module, small, few_pixels)
    assert (features(modules[0], few_pixels) - before).abs().max() > 1e-3
    assert len(inlined) == 4


@pytest.mark.slow
def test_a_forward_that_is_compiled_alone_refuses_changed_blocks(small: Any, few_pixels: Tensor) -> None:
    forward = compiled(SmallAdapter(small).forward)
    features(forward, few_pixels)
    with torch.no_grad():
        replace_layer(small)
    with pytest.raises(ChangedBlocksError, match="the blocks of a compiled tower have changed"):
        features(forward, few_pixels)


@pytest.mark.slow
def test_between_two_looks_outputs_come_from_the_old_memory(
    small: Any, few_pixels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(parameters.time, "monotonic", lambda: now)
    module = compiled(SmallAdapter(small), weight_check_seconds=5)
    before = features(module, few_pixels)
    layer = small.blocks[1].mlp.linear_fc1
    layer.weight = nn.Parameter(layer.weight * 3, requires_grad=False)
    now = 104.0
    torch.testing.assert_close(features(module, few_pixels), before)
    small.blocks[1].norm1.weight.mul_(1.5)  # in place: captures read it
    assert (features(module, few_pixels) - before).abs().max() > 1e-4
    now = 106.0
    assert_equal_features(module, small, few_pixels)
    with torch.no_grad():
        replace_layer(small)
    now = 110.0
    assert (features(module, few_pixels) - features(small, few_pixels)).abs().max() > 1e-4
    now = 112.0
    assert_equal_features(module, small, few_pixels)


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_tensors_are_compared_with_those_of_the_call_before(seconds: float) -> None:
    """Whether or not that one looked: what was derived from other tensors meanwhile is not of these."""
    program: Any = SimpleNamespace(num_inputs=1, static_inputs={0})
    looked_at = parameters.CallParameters(program, LiveWeights(), seconds)
    first, second = torch.zeros(2, 3), torch.ones(2, 3)
    given = (first, first, second, first, first, second, second)
    found = []
    for tensor in given:
        looked_at.current([tensor])
        found.append(looked_at.are_the_same)
    assert found == [False, True, False, False, True, False, True]


@pytest.mark.slow
def test_a_look_that_raised_is_made_again(
    small: Any, few_pixels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(parameters.time, "monotonic", lambda: now)
    module = compiled(SmallAdapter(small), weight_check_seconds=5)
    features(module, few_pixels)
    small.blocks[1].attn.proj.double()
    now = 106.0
    for _ in range(2):
        with pytest.raises(WeightsLayoutError):
            features(module, few_pixels)
