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


@pytest.mark.slow
@pytest.mark.parametrize("name", fx.supported_towers())
def test_a_video_is_its_parts_one_after_the_other(name: str) -> None:
    tower = fx.wrap(make(name))
    if not isinstance(tower, PackedTower) or not tower.frames_are_independent:
        pytest.skip("its frames depend on each other, or it takes none")
    made = tiny(name).inputs.make(items("video", [GRID]))
    pixels, grid = "pixel_values_videos", "video_grid_thw"
    frames = made[pixels].view(GRID[0], -1, *made[pixels].shape[1:])
    parts = []
    for part in frames.split([1, 2, 2]):
        own = torch.tensor([[len(part), *GRID[1:]]])
        parts.append(eager(tower, {pixels: part.flatten(0, 1), grid: own}))
    whole = eager(tower, {pixels: made[pixels], grid: torch.tensor([GRID])})
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)
