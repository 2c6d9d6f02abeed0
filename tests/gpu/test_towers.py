"""Every family at its true width in bfloat16, fewer blocks: no further from float32 than eager is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.models.eager import as_tensors, rms_error, share_weights
from fxsplit_encoder.models.random import demo_tower, random_inputs
from fxsplit_encoder.models.registry import architecture
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.tiles import TiledTower

from .support import poison

pytestmark = pytest.mark.gpu

BLOCKS = 3
PACKED = ("qwen2.5-vl-7b", "glm-4.1v-9b", "qwen2-vl-7b", "qwen3.5-9b", "kimi-vl-a3b", "kimi-k2.5")
TILES = ("internvl3-8b", "internvl3-38b", "llama4", "siglip-so400m-384", "clip-l-336", "dinov2-l-518")
VIEWS = ("deepseek-ocr", "step3-vl", "step3p7")

# Patches, tiles, and crops of every image. All budgets are filled in part only.
SIZES = {
    **dict.fromkeys(PACKED, (256, 96, 660, 16)),
    **dict.fromkeys(TILES, (1, 2)),
    **dict.fromkeys(VIEWS, (0, 2)),
}


def budgets(wrapped: Any) -> dict[str, Any]:
    if isinstance(wrapped, PackedTower):
        return {"token_budgets": (64, 512), "max_items_per_batch": 8, "max_frames_per_batch": 0}
    if isinstance(wrapped, TiledTower):
        room = {"global": 4, "local": 3}
        return {"paths": {p: {"token_budgets": (room[p] * v.tokens,)} for p, v in wrapped.views.items()}}
    return {"token_budgets": (4 * wrapped.tokens_per_tile,)}


def exact_items(tower: Any, family: Any, inputs: dict[str, Any], count: int) -> list[torch.Tensor]:
    """In float32, image by image."""
    exact = family.eager_tower(copy.deepcopy(tower).float())
    select = exact.adapter.select_encoder_cudagraph_items
    return [exact(as_tensors(select(inputs, [index])))[0] for index in range(count)]


def assert_as_near_as_eager(
    manager: Any, inputs: dict[str, Any], exact: Sequence[torch.Tensor], allowed: float
) -> None:
    for _ in range(2):
        poison(manager.pool)
        assert rms_error(manager.execute(inputs), exact) <= allowed


@pytest.mark.parametrize("model", SIZES)
@torch.no_grad()
def test_a_tower_is_as_near_to_float32_as_eager(model: str, full_precision: None) -> None:
    family, sizes = architecture(model).family, SIZES[model]
    tower = demo_tower(BLOCKS, "cuda", torch.bfloat16, model=model)
    wrapped = family.wrap(share_weights(tower))
    inputs = random_inputs(wrapped, sizes)
    exact = exact_items(tower, family, inputs, len(sizes))
    allowed = 1.1 * rms_error(family.eager_tower(tower)(inputs), exact)
    programs: dict[str, Any] = {}
    for mode in ("full", "piecewise"):
        config = fx.EncoderConfig(mode=mode, packing="greedy", **budgets(wrapped))
        manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
        for name, program in programs.items():  # compiled once for both modes
            manager.paths[name].bind(program)
        manager.capture()
        assert not manager.reports
        programs = manager.programs
        assert all(program.program.padding.proved for program in programs.values())
        assert_as_near_as_eager(manager, inputs, exact, allowed)
        assert manager.stats().hit_rate == 1
        manager.clear()
