from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from .packed_tower_tests import PATCH, PackedTowerTests


class TestQwen2VL(PackedTowerTests):
    metadata: ClassVar[list[str]] = ["position_ids", "cu_seqlens"]
    image_processors: ClassVar[list[Any]] = [Qwen2VLImageProcessorPil]

    @classmethod
    def make_tower(cls) -> nn.Module:
        config = Qwen2VLVisionConfig(depth=3, embed_dim=32, hidden_size=24, num_heads=2, patch_size=PATCH)
        return Qwen2VisionTransformerPretrainedModel(config)
