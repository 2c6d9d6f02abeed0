"""Which changes of a compiled tower's parameters and blocks are noticed, and when."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.backend import dispatchers
from fxsplit_encoder.compile.blocks import ChangedBlocksError
from fxsplit_encoder.runtime import requests
from tests.small_tower import SmallAdapter

from .towers import assert_equal_features, compiled, features

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def replace_layer(inner: Any) -> None:
    layer = inner.blocks[1].mlp.linear_fc1
    inner.blocks[1].mlp.linear_fc1 = nn.Linear(layer.in_features, layer.out_features).requires_grad_(False)


@pytest.mark.slow
def test_changed_blocks_are_traced_again(small: Any, few_pixels: Tensor, inlined: list[int]) -> None:
    """By every compiled module of the tower. tests/_torch/test_structure.py shows what counts as a change."""
    tower = SmallAdapter(small)
    modules = [compiled(tower), compiled(tower, token_budgets=[16])]
    before, _ = (features(module, few_pixels) for module in modules)
    small.blocks[1] = copy.deepcopy(small.blocks[1])
    small.blocks[1].norm1.weight.mul_(3)
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
    monkeypatch.setattr(requests.time, "monotonic", lambda: now)
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


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_weights_replaced_before_any_call_are_those_that_it_reads(before: int, dynamic: bool) -> None:
    """Before a run at the exact shape, the call that captures, and replays."""
    layer = nn.Linear(4, 4).requires_grad_(False)
    module: Any = torch.compile(
        layer, backend="encoder_cg", dynamic=dynamic, options={"exact_min_hits": 2, "token_budgets": [3, 8]}
    )
    images = torch.randn(3, 4)
    for call in range(5):
        if call == before:
            layer.weight.data = layer.weight * 3
            layer.bias = nn.Parameter(layer.bias + 1, requires_grad=False)
        torch.testing.assert_close(module(images), layer(images))
    assert fx.stats(module).hits >= 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_modules_of_one_class_share_a_graph_and_have_their_own_captures(dynamic: bool) -> None:
    """Also those whose parameters are replaced, and one after the others are no more."""
    images, options = torch.randn(3, 4), {"exact_min_hits": 2, "token_budgets": [3, 8]}
    layers = [nn.Linear(4, 4).requires_grad_(False) for _ in range(3)]

    def compiled(layer: nn.Linear) -> Any:
        return torch.compile(layer, backend="encoder_cg", dynamic=dynamic, options=options)

    modules: list[Any] = [compiled(layer) for layer in layers]
    for call in range(6):
        for number, (module, layer) in enumerate(zip(modules, layers, strict=True)):
            if (call, number) == (3, 1):
                layer.weight.data = layer.weight * 3
            if (call, number) == (4, 2):
                layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}, assign=True)
            torch.testing.assert_close(module(images), layer(images))
    known = dispatchers()
    assert len(known) == 3
    hits = [fx.stats(module).hits for module in modules]
    assert min(hits) >= 6 - 3 and sum(hits) == sum(each.hits for each in known) >= 3 * 6 - 3 * 2 - 2
    del modules, module, layers[1:], layer
    layer = nn.Linear(4, 4).requires_grad_(False)
    torch.testing.assert_close(compiled(layer)(images), layer(images))
    assert set(dispatchers()) == set(known)


@pytest.mark.parametrize("shared", ["weight", "bias"])
def test_modules_that_share_a_parameter_have_their_own_captures(shared: str) -> None:
    images, options = torch.randn(3, 4), {"exact_min_hits": 2, "weight_check_seconds": 60}
    layers = [nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
    setattr(layers[1], shared, getattr(layers[0], shared))
    modules: list[Any] = [torch.compile(layer, backend="encoder_cg", options=options) for layer in layers]
    for module, layer in list(zip(modules, layers, strict=True)) * 4:
        torch.testing.assert_close(module(images), layer(images))
    assert [fx.stats(module).hits for module in modules] == [3, 3]
