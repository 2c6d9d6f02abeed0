import ast
import importlib.util
import math
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import SizeDict

from fxsplit_encoder.models.patches import padded_size, patchify_raster
from fxsplit_encoder.models.tiling import (
    Step3Plan,
    cut,
    deepseek_crops,
    llama4_grid,
    llama4_tiles,
    step3_plan,
    step3_views,
)


def library(module: str, *names: str) -> dict[str, Any]:
    """Functions and classes of a module of transformers that cannot be imported without torchvision."""
    spec = importlib.util.find_spec(f"transformers.models.{module}")
    assert spec is not None and spec.origin is not None
    found: list[ast.stmt] = []
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            found.append(node)
        if isinstance(node, ast.ClassDef):
            found += [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in names]
    known = {"math": math, "torch": torch, "SizeDict": SizeDict, "defaultdict": defaultdict}
    values: dict[str, Any] = {**known, "lru_cache": lru_cache}
    exec(compile(ast.Module(found, []), spec.origin, "exec"), values)
    return values


LLAMA4 = library(
    "llama4.image_processing_llama4",
    "get_factors",
    "find_supported_resolutions",
    "get_best_fit",
    "get_max_res_without_distortion",
)
STEP3 = library("step3p7.image_processing_step3p7", "_is_extreme_aspect", "_plan_patches")
NAVIT = library("kimi_k25.image_processing_kimi_k25", "navit_resize")

sides = st.integers(1, 4000)


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


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


@pytest.mark.parametrize(
    ("size", "side", "grid"),
    [
        ((640, 640), 640, (1, 1)),
        ((1280, 640), 640, (2, 1)),
        ((2000, 2000), 640, (3, 3)),
        ((500, 4000), 640, (1, 8)),
        ((640, 640), 1024, (1, 1)),
        ((1000, 500), 1024, (2, 1)),
    ],
)
def test_large_pages_are_cut(size: tuple[int, int], side: int, grid: tuple[int, int]) -> None:
    found, crops = deepseek_crops(noise(*size), side, 9)
    assert found == grid
    assert len(crops) == (grid[0] * grid[1] if grid != (1, 1) else 0)
    assert {crop.size for crop in crops} <= {(side, side)}


def test_tiles_are_cut_row_by_row() -> None:
    image = noise(5, 4)
    pixels = np.asarray(image)
    tiles = [np.asarray(tile) for tile in cut(image, 2, 2)]
    expected = [pixels[y : y + 2, x : x + 2] for y in (0, 2) for x in (0, 2)]
    np.testing.assert_array_equal(tiles, expected)


@given(sides, sides, st.sampled_from([64, 4096, 16384]), st.sampled_from([16, 512]))
def test_moonvit_fits_as_the_library_does(height: int, width: int, max_patches: int, max_side: int) -> None:
    expected = NAVIT["navit_resize"](height, width, 14, 2, max_patches, max_side)
    assert padded_size(height, width, 14, 2, max_patches, max_side) == expected


def test_patches_in_raster_order() -> None:
    frames = np.arange(2 * 3 * 4 * 6, dtype=np.float32).reshape(2, 3, 4, 6)
    patches = patchify_raster(frames, 2)
    assert patches.shape == (12, 3, 2, 2)
    np.testing.assert_array_equal(patches[4], frames[0, :, 2:4, 2:4])
    np.testing.assert_array_equal(patches[6], frames[1, :, :2, :2])
