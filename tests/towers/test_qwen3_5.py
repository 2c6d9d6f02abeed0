from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

import fxsplit_encoder as fx

from .packed_tower_tests import PATCH, PackedTowerTests, assert_equal, make_batch, random_weights

SIZES = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 24,
    "patch_size": PATCH,
    "num_position_embeddings": 49,
}


class TestQwen35(PackedTowerTests):
    metadata: ClassVar[list[str]] = ["position_ids", "interp_indices", "interp_weights", "cu_seqlens"]
    image_processors: ClassVar[list[Any]] = [Qwen2VLImageProcessorPil]

    @classmethod
    def make_tower(cls) -> nn.Module:
        return Qwen3_5VisionModel(Qwen3_5VisionConfig(**SIZES))


@torch.no_grad()
def test_the_mixture_of_experts_models_have_the_same_tower() -> None:
    reference = random_weights(Qwen3_5MoeVisionModel(Qwen3_5MoeVisionConfig(**SIZES)))
    inputs = make_batch([(1, 4, 6), (2, 4, 4)])
    expected = reference(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    manager = fx.EncoderCudaGraphManager(fx.wrap(reference), fx.EncoderConfig(mode="none"))
    assert_equal(manager.execute(inputs), expected.split([6, 8]))
