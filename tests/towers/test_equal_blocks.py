"""Towers by name; towers of tiles behind torch.compile, where one of the equal blocks is traced for all."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import SiglipVisionConfig, SiglipVisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.compile.blocks import equal_modules, weights_of
from fxsplit_encoder.towers import base
from fxsplit_encoder.towers.base import registered_tower

from ..small_tower import FEATURES, SmallAdapter
from .random_weights import randomize
from .tiny_tiles import internvl, llama4_tower

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
SPEC = fx.DenseTowerSpec((3, 16, 16), 16, 16, has_plain_blocks=True)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def siglip(spec: fx.DenseTowerSpec = SPEC) -> Any:
    config = SiglipVisionConfig(**SIZES, num_hidden_layers=2, intermediate_size=24)
    return fx.wrap(randomize(SiglipVisionModel(config)), spec)


def compiled(tower: Any) -> Any:
    tokens = tower.first_view.tokens
    options = {"token_budgets": [tokens, 3 * tokens], "mode": "full", "piece_compiler": "eager"}
    return torch.compile(tower, backend="encoder_cg", fullgraph=True, options=options)


@torch.no_grad()
def outputs(tower: Any, tiles: Tensor, **options: Any) -> list[Tensor]:
    output = tower(tiles, **options)
    return [each for each in tree_leaves(getattr(output, "to_tuple", lambda: output)()) if each is not None]


def assert_equal_outputs(module: Any, tower: Any, counts: list[int], **options: Any) -> None:
    for count in counts:
        tiles = torch.randn(count, *tower.first_view.shape, generator=torch.Generator().manual_seed(count))
        for got, expected in zip(
            outputs(module, tiles, **options), outputs(tower, tiles, **options), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_one_block_is_traced_for_all(inlined: list[int]) -> None:
    tower = fx.wrap(randomize(internvl(2)))
    expected = sum(len(weights_of(block)) for blocks in equal_modules(tower.tower) for block in blocks)
    assert expected > 0
    assert_equal_outputs(compiled(tower), tower, [2, 1, 3])
    assert set(inlined) == {expected}


def test_a_call_that_looks_into_blocks_is_the_towers_own(inlined: list[int]) -> None:
    tower = siglip()
    assert_equal_outputs(compiled(tower), tower, [2], output_hidden_states=True)
    assert not inlined
    assert tower.eager_calls.total() == 2


def test_towers_that_do_not_say_so_are_traced_whole(inlined: list[int]) -> None:
    assert not siglip(fx.DenseTowerSpec((3, 16, 16), 16, 16)).has_plain_blocks
    assert not fx.wrap(llama4_tower()).has_plain_blocks
    tower = SmallAdapter()
    tower.has_plain_blocks = False
    options = {"token_budgets": [4], "piece_compiler": "eager"}
    given = torch.randn(16, FEATURES), torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        got = torch.compile(tower, backend="encoder_cg", fullgraph=True, options=options)(*given)
        torch.testing.assert_close(got, tower(*given), rtol=1e-5, atol=1e-5)
    assert set(inlined) == {0}


def test_towers_have_names_of_their_own_and_are_not_kept_alive() -> None:
    one, other = siglip(), siglip()
    names = {one.registered_name, other.registered_name}
    assert len(names) == 2
    assert names <= set(base.WrappedTower.registered)
    assert registered_tower(one.registered_name) is one
    del one, other
    gc.collect()
    assert not names & set(base.WrappedTower.registered)
