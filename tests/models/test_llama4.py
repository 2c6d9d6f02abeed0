from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import SizeDict

from fxsplit_encoder.models.llama4 import llama4_grid, llama4_tiles

from .processors import library

sides = st.integers(1, 4000)

LLAMA4 = library(
    "llama4.image_processing_llama4",
    "get_factors",
    "find_supported_resolutions",
    "get_best_fit",
    "get_max_res_without_distortion",
)


@given(sides, sides, st.sampled_from([4, 16]))
def test_llama4_has_the_librarys_canvas(width: int, height: int, max_tiles: int) -> None:
    tile = SizeDict(height=336, width=336)
    supported = torch.tensor(LLAMA4["find_supported_resolutions"](max_tiles, tile))
    expected = LLAMA4["get_best_fit"]((height, width), supported).tolist()
    columns, rows = llama4_grid(width, height, 336, max_tiles)
    assert [rows * 336, columns * 336] == expected


@pytest.mark.parametrize(
    ("size", "grid", "count", "inside"),
    [
        ((300, 200), (1, 1), 1, (336, 224)),
        ((1344, 336), (4, 1), 5, (1344, 336)),
        ((700, 700), (3, 3), 10, (700, 700)),
        ((5000, 2500), (5, 3), 16, (1680, 840)),
    ],
)
def test_llama4_keeps_the_aspect_ratio_on_black(
    size: tuple[int, int], grid: tuple[int, int], count: int, inside: tuple[int, int]
) -> None:
    white = Image.new("RGB", size, (255, 255, 255))
    found, tiles = llama4_tiles(white, 336, 16)
    assert (found, len(tiles)) == (grid, count)
    assert {tile.size for tile in tiles} == {(336, 336)}
    lit = sum((np.asarray(tile)[..., 0] > 127).sum() for tile in tiles[: grid[0] * grid[1]])
    assert lit == inside[0] * inside[1]
