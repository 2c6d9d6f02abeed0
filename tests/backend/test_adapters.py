"""PEFT's adapters in a compiled tower: Dynamo's guards tell the states apart, and keep the graphs of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.backend import BudgetDispatcher
from fxsplit_encoder.compile.blocks import equal_modules
from tests.small_tower import SmallAdapter

from .towers import assert_equal_features, compiled

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def with_adapters(small: Any) -> Any:
    """A tower with the adapters "one" and "two"."""
    for rank, name in ((2, "one"), (3, "two")):
        add(small, name, rank)
    change(small, lambda layer: layer.set_adapter("one"))
    return small


def add(small: Any, name: str, rank: int) -> None:
    torch.manual_seed(rank)
    vars(small).pop("peft_config", None)  # of which the second would warn
    lora = peft.LoraConfig(r=rank, init_lora_weights=False, target_modules=["linear_fc1"])
    peft.inject_adapter_in_model(lora, small, adapter_name=name).eval()


def change(small: Any, how: Callable[[Any], None]) -> None:
    for block in small.blocks:
        how(block.mlp.linear_fc1)


def test_blocks_with_adapters_are_equal(with_adapters: Any) -> None:
    (group,) = [group for group in equal_modules(with_adapters) if with_adapters.blocks[0] in group]
    assert [*group] == [*with_adapters.blocks]
    with_adapters.blocks[2].mlp.linear_fc1.set_scale("one", 5)
    assert with_adapters.blocks[2] not in [block for group in equal_modules(with_adapters) for block in group]


@pytest.mark.slow
def test_each_state_is_compiled_once(
    with_adapters: Any, few_pixels: Tensor, made: Callable[[], list[BudgetDispatcher]]
) -> None:
    module = compiled(SmallAdapter(with_adapters), piece_compiler="eager")
    changes: list[Callable[[Any], None]] = [
        lambda layer: layer.set_adapter("two"),
        lambda layer: layer.set_adapter("one"),
        lambda layer: layer.enable_adapters(False),
        lambda layer: layer.enable_adapters(True),
    ]
    assert_equal_features(module, with_adapters, few_pixels)
    for _ in range(2):
        for how in changes:
            change(with_adapters, how)
            assert_equal_features(module, with_adapters, few_pixels)
        assert len(made()) == 3
    with torch.no_grad():
        change(with_adapters, lambda layer: layer.lora_B["one"].weight.mul_(3))
    assert_equal_features(module, with_adapters, few_pixels)
    assert len(made()) == 3
    stats = fx.stats(module)
    assert (stats.hits, stats.misses) == (10, {})
