from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

import fxsplit_encoder as fx

from .packed_tower_tests import PackedTowerTests, assert_equal, make_batch
from .random_weights import randomise
from .tiny_packed import qwen3_5


@pytest.mark.slow
class TestQwen35(PackedTowerTests):
    metadata: ClassVar[list[str]] = ["position_ids", "interp_indices", "interp_weights", "cu_seqlens"]

    @classmethod
    def make_tower(cls) -> nn.Module:
        return qwen3_5(blocks=3)


@torch.no_grad()
def test_the_mixture_of_experts_models_have_the_same_tower() -> None:
    reference = randomise(qwen3_5(blocks=3, moe=True))
    inputs = make_batch([(1, 4, 6), (2, 4, 4)])
    expected = reference(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    manager = fx.EncoderCudaGraphManager(fx.wrap(reference), fx.EncoderConfig(mode="none"))
    assert_equal(manager.execute(inputs), expected.split([6, 8]))
