from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open

from fxsplit_encoder.models.load import load_tower
from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import FAMILIES
from fxsplit_encoder.models.step3 import Step3Plan, step3_plan, step3_views

from .checkpoints import CPU, STACK
from .processors import library, noise

sides = st.integers(1, 4000)

STEP3 = library("step3p7.image_processing_step3p7", "_is_extreme_aspect", "_plan_patches")


@given(sides, sides)
def test_step3_has_the_librarys_plan(width: int, height: int) -> None:
    class Processor:
        max_image_size = 3024
        _is_extreme_aspect = staticmethod(STEP3["_is_extreme_aspect"].__func__)

    expected = STEP3["_plan_patches"](Processor(), width, height, 728, 504)
    plan = step3_plan(width, height, 728, 504)
    assert plan == Step3Plan(expected[5], expected[0], expected[1], expected[2])
    if plan.window and max(plan.size) <= 1500:
        grid, _, crops = step3_views(Image.new("RGB", (width, height)), 728, 504)
        assert grid == expected[3:5]
        assert len(crops) == grid[0] * grid[1]
        assert {crop.size for crop in crops} <= {(504, 504)}


def test_step3_views_are_squares_of_their_sizes() -> None:
    for size, grid in {
        (700, 600): (0, 0),
        (1100, 520): (2, 1),
        (600, 200): (3, 1),
        (400, 20): (0, 0),
    }.items():
        found, whole, crops = step3_views(noise(*size), 728, 504)
        assert (found, whole.size, len(crops)) == (grid, (728, 728), grid[0] * grid[1])


@torch.no_grad()
def test_step3p7_is_loaded_as_the_library_saves_it(tmp_path: Path) -> None:
    """`save_pretrained` writes the published names, with fused projections in the published order."""
    vision, directory = FAMILIES["step3p5_vision"], tmp_path / "checkpoint"
    saved: Any = vision.build({**STACK, "mlp_ratio": 1.5}).requires_grad_(False).eval()
    draw_weights(saved, 0)
    saved.save_pretrained(directory)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert "transformer.resblocks.0.attn.in_proj_weight" in set(file.keys())
    tower = load_tower(directory, torch.float32, CPU)
    expected = dict(saved.named_parameters())
    assert all(torch.equal(parameter, expected[key]) for key, parameter in tower.named_parameters())
