"""The configurations of the Kimi towers suit them."""

from pathlib import Path

import pytest
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

import fxsplit_encoder as fx
from fxsplit_encoder.towers.models.moonvit import KimiVLVisionConfig, KimiVLVisionModel

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
TOWERS = {
    "kimi_vl": lambda: KimiVLVisionModel(KimiVLVisionConfig(**SIZES)),
    "kimi_k25": lambda: Kimi_K25VisionModel(Kimi_K25VisionConfig(**SIZES)),
}


@pytest.mark.parametrize("name", TOWERS)
def test_the_configuration_suits_the_tower(name: str) -> None:
    config = fx.EncoderConfig.from_yaml(CONFIGS / f"{name}.yaml")
    wrapped = fx.wrap(TOWERS[name]())
    manager = fx.EncoderCudaGraphManager(wrapped, config)
    low, high = wrapped.get_encoder_cudagraph_budget_range(None)
    assert (config.token_budgets[0], config.token_budgets[-1]) == (low, high)
    assert manager.limits.max_items_per_batch == config.max_items_per_batch
    assert manager.limits.max_frames_per_batch == config.max_frames_per_batch
