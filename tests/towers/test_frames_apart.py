"""Towers that say so encode every frame of a video as if it were alone."""

from __future__ import annotations

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.towers.packed import PackedTower

from .tiny_inputs import items
from .tiny_towers import make, tiny

GRID = (5, 4, 6)


def eager(tower: fx.SupportsEncoderCudaGraph, kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        (rows,) = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(mode="none")).execute(kwargs)
    return rows


def rows_apart(name: str, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a video, and of its parts one after the other."""
    tower = fx.wrap(make(name))
    made = tiny(name).inputs.make(items("video", [GRID]))
    pixels, grid = "pixel_values_videos", "video_grid_thw"
    frames = made[pixels].view(GRID[0], -1, *made[pixels].shape[1:])
    parts = []
    for part in frames.split(cuts):
        own = torch.tensor([[len(part), *GRID[1:]]])
        parts.append(eager(tower, {pixels: part.flatten(0, 1), grid: own}))
    return eager(tower, {pixels: made[pixels], grid: torch.tensor([GRID])}), torch.cat(parts)


@pytest.mark.parametrize(
    "name", ["Glm4vVisionModel", "Qwen2VisionTransformerPretrainedModel", "Qwen3VLVisionModel"]
)
def test_a_video_is_its_parts_one_after_the_other(name: str) -> None:
    whole, parts = rows_apart(name, [1, 2, 2])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", fx.supported_towers())
def test_every_tower_that_says_so_does(name: str) -> None:
    tower = fx.wrap(make(name))
    if not isinstance(tower, PackedTower) or not tower.frames_are_independent:
        pytest.skip("its frames depend on each other, or it takes none")
    whole, parts = rows_apart(name, [3, 2])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)
