"""How models cut an image into tiles, in numbers and on Pillow images; no torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

Grid = tuple[int, int]
"""(columns, rows)."""

_BILINEAR = Image.Resampling.BILINEAR
_BICUBIC = Image.Resampling.BICUBIC


def cut(image: Image.Image, width: int, height: int) -> Iterator[Image.Image]:
    """The tiles of an image row by row; what is left over at its right and lower edge is dropped."""
    for top in range(0, image.height - height + 1, height):
        for left in range(0, image.width - width + 1, width):
            yield image.crop((left, top, left + width, top + height))


# --- Llama 4 (transformers' Llama4ImageProcessor)


def llama4_grid(width: int, height: int, tile: int, max_tiles: int) -> Grid:
    """The canvas of whole tiles on which an image is shrunk least; where it could be enlarged, the one that
    enlarges it least. Among equals it is the smallest.
    """
    grids = [(c, r) for c in range(1, max_tiles + 1) for r in range(1, max_tiles // c + 1)]
    # In float32, as the processor compares them.
    across, down = (np.array(sides, np.float32) * tile for sides in zip(*grids, strict=True))
    scales = np.minimum(across / np.float32(width), down / np.float32(height))
    best = scales[scales >= 1].min() if (scales >= 1).any() else scales.max()
    equal = [grid for grid, scale in zip(grids, scales, strict=True) if scale == best]
    return min(equal, key=lambda grid: grid[0] * grid[1])


def llama4_tiles(image: Image.Image, tile: int, max_tiles: int) -> tuple[Grid, list[Image.Image]]:
    """The grid, and its tiles; behind several the whole image as one more.

    The image keeps its aspect ratio: it lies at the upper left of the canvas, on black. It is not enlarged
    beyond one tile.
    """
    columns, rows = grid = llama4_grid(*image.size, tile, max_tiles)
    width = min(max(image.width, tile), columns * tile)
    height = min(max(image.height, tile), rows * tile)
    if width / image.width < height / image.height:
        height = min(int(image.height * (width / image.width)), height)
    else:
        width = min(int(image.width * (height / image.height)), width)
    canvas = Image.new("RGB", (columns * tile, rows * tile))
    canvas.paste(image.resize((max(width, 1), max(height, 1)), _BILINEAR))
    tiles = list(cut(canvas, tile, tile))
    return grid, [*tiles, image.resize((tile, tile), _BILINEAR)] if len(tiles) > 1 else tiles


# --- DeepSeek-OCR (its model's own `infer`; the grid is InternVL's)


DEEPSEEK_SMALL = 640
"""Pixels a side: images up to it have no crops, and modes up to it that have no crops stretch images."""


def deepseek_crops(image: Image.Image, side: int, max_crops: int) -> tuple[Grid, list[Image.Image]]:
    """The grid and its crops, of the image stretched over them; a small image has none, whatever `side`."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    if max(image.size) <= DEEPSEEK_SMALL:
        return (1, 1), []
    columns, rows = get_optimal_tiled_canvas((image.height, image.width), (side, side), 2, max_crops)
    return (columns, rows), list(cut(image.resize((columns * side, rows * side), _BICUBIC), side, side))


# --- Step3 and Step-3.7 (transformers' Step3p7ImageProcessor)

_LARGEST_SIDE = 3024


@dataclass(frozen=True)
class Step3Plan:
    """How an image is cut."""

    square: bool
    """Whether it is put on a black square first: a strip under 32 pixels."""
    size: tuple[int, int]
    """Width and height to which it is then resized."""
    crop_size: tuple[int, int]
    """Width and height to which it is resized before it is cut."""
    window: int
    """Side of a crop in pixels; 0: there are none."""


def step3_plan(width: int, height: int, image_size: int, crop_size: int) -> Step3Plan:
    """Images that the whole view holds have crops only if they are elongated; crops cover the image without
    overlap, and a remainder of less than a fifth of a crop is squeezed in.
    """
    square = min(width, height) < 32 and max(width, height) > 4 * min(width, height)
    if square:
        width = height = max(width, height)
    if max(width, height) > _LARGEST_SIDE:
        scale = _LARGEST_SIDE / max(width, height)
        width, height = int(width * scale), int(height * scale)
    short, long = sorted((width, height))
    if long <= image_size:
        window = short if long / short > 1.5 else 0
    else:
        window = min(short, crop_size) if long / short > 4 else crop_size
    if not window:
        return Step3Plan(square, (width, height), (width, height), 0)
    across, down = (
        window * (side // window + (side % window > 0.2 * window)) if side >= window else side
        for side in (width, height)
    )
    return Step3Plan(square, (width, height), (across, down), window)


def step3_views(
    image: Image.Image, image_size: int, crop_size: int
) -> tuple[Grid, Image.Image, list[Image.Image]]:
    """The grid of crops, the whole view, and the crops; (0, 0) without any."""
    plan = step3_plan(*image.size, image_size, crop_size)
    if plan.square:
        canvas = Image.new("RGB", (max(image.size),) * 2)
        canvas.paste(image)
        image = canvas
    whole = image.resize(plan.size, _BILINEAR).resize((image_size, image_size), _BILINEAR)
    if not plan.window:
        return (0, 0), whole, []
    cropped = image.resize(plan.crop_size, _BILINEAR)
    # A side shorter than a crop is one crop.
    width, height = (min(plan.window, side) for side in plan.crop_size)
    grid = (plan.crop_size[0] // width, plan.crop_size[1] // height)
    crops = [crop.resize((crop_size, crop_size), _BILINEAR) for crop in cut(cropped, width, height)]
    return grid, whole, crops
