"""The packed towers at their true widths in bfloat16, fewer blocks: no further from float32 than eager is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.cli.models import demo_tower

pytestmark = pytest.mark.gpu

MODELS = ("qwen2.5-vl-7b", "glm-4.1v-9b", "qwen2-vl-7b", "qwen3.5-9b")
GRIDS = [(1, 16, 16), (1, 8, 12), (1, 30, 22), (1, 4, 4)]


def rms(items: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    differences = [(a.float() - b.float()).square().mean() for a, b in zip(items, expected, strict=True)]
    return float(torch.stack(differences).mean().sqrt())


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_a_tower_is_as_near_to_float32_as_eager(model: str) -> None:
    eager = demo_tower(4, "cuda", torch.bfloat16, model=model)
    exact, plain, tower = (fx.wrap(copy.deepcopy(eager)) for _ in range(3))
    exact.float()
    rows = sum(t * h * w for t, h, w in GRIDS)
    pixels = torch.randn(rows, tower.patch_features, device="cuda").bfloat16()
    inputs: dict[str, Any] = {"pixel_values": pixels, "image_grid_thw": torch.tensor(GRIDS)}
    tokens = [spec.output_tokens for spec in tower.get_encoder_cudagraph_item_specs(inputs)]
    reference = exact.encoder_eager_forward({**inputs, "pixel_values": pixels.float()}).split(tokens)
    allowed = 1.1 * rms(list(plain.encoder_eager_forward(inputs).split(tokens)), list(reference))
    for mode in ("full", "piecewise"):
        config = fx.EncoderConfig(
            mode=mode,
            packing="greedy",
            token_budgets=(64, 256, 512),
            max_items_per_batch=8,
            max_frames_per_batch=0,
        )
        manager = fx.EncoderCudaGraphManager(tower, config)
        manager.capture()
        assert not manager.reports
        for _ in range(2):
            assert rms(manager.execute(inputs), list(reference)) <= allowed
        assert manager.stats().hit_rate == 1
        manager.clear()
