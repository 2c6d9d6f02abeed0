"""The configurations in configs/ fit the published sizes of the towers that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.manager.budgets import resolve_limits

CONFIGS = Path(__file__).parents[2] / "configs"


def deepseek_ocr() -> Any:
    from fxsplit_encoder.towers.models.deepseek_encoder import DeepseekOcrVisionModel

    return DeepseekOcrVisionModel()


def step3p7() -> Any:
    from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

    return Step3p7VisionModel(Step3p7VisionConfig())


def step3_vl() -> Any:
    from fxsplit_encoder.towers.models.step3_vision import Step3VisionModel

    return Step3VisionModel()


@pytest.mark.parametrize("make", [deepseek_ocr, step3p7, step3_vl], ids=lambda f: f.__name__)
def test_every_budget_is_filled_by_whole_tiles(make: Any) -> None:
    config = fx.EncoderConfig.from_yaml(CONFIGS / f"{make.__name__}.yaml")
    with torch.device("meta"):
        wrapped = fx.wrap(make())
    limits = resolve_limits(
        config,
        wrapped.get_encoder_cudagraph_config(),
        wrapped.get_encoder_cudagraph_budget_range(None),
        has_video=False,
    )
    assert limits.path_budgets.keys() == config.paths.keys() == wrapped.views.keys()
    for path, budgets in limits.path_budgets.items():
        assert all(budget % wrapped.views[path].tokens == 0 for budget in budgets)
    assert limits.path_budgets["global"][-1] == limits.max_items_per_batch * wrapped.views["global"].tokens
