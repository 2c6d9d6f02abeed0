"""Random inputs of given sizes for a wrapped tower, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import torch

from fxsplit_encoder.towers.dense import DenseTower
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.tiled import TiledTower


def random_inputs(wrapped: Any, sizes: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """`mm_kwargs` of images of these sizes, in the tower's dtype on its device, the same for the same seed.

    Args:
        wrapped: what `wrap` returns.
        sizes: of every image: patches of a packed tower, a multiple of those that become a token; tiles of a
            tower of equal tiles; crops of one that also sees the image as a whole.
        seed: on one kind of device.
    """
    generator = torch.Generator(wrapped.device).manual_seed(seed)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=wrapped.device, dtype=wrapped.dtype)

    if isinstance(wrapped, PackedTower):
        grids = [_most_square(size, wrapped.merge_size) for size in sizes]
        return _packed(wrapped, grids, pixels(sum(sizes), wrapped.patch_features))
    if isinstance(wrapped, DenseTower):
        tiles = pixels(sum(sizes), *wrapped.tile_shape)
        return {wrapped.input_name: tiles, wrapped.count_keys[0]: torch.tensor(sizes)}
    assert isinstance(wrapped, TiledTower)
    counts = {"global": len(sizes), "local": sum(sizes)}
    views = {view.input_name: pixels(counts[path], *view.shape) for path, view in wrapped.views.items()}
    return {**views, **_crops(wrapped, sizes)}


def _packed(wrapped: PackedTower, grids: list[tuple[int, int]], patches: torch.Tensor) -> dict[str, Any]:
    pixels_key, grids_key = wrapped.input_keys[0]
    shape = getattr(wrapped, "patch_shape", None)
    with_frames = grids_key.endswith("thw")
    sizes = torch.tensor([(1, *grid) if with_frames else grid for grid in grids])
    return {pixels_key: patches if shape is None else patches.view(-1, *shape), grids_key: sizes}


def _crops(wrapped: TiledTower, counts: Sequence[int]) -> dict[str, Any]:
    """What says how many crops every image has, under the names that the adapter reads."""
    if type(wrapped).__name__ == "DeepseekOcrTower":
        grids = [_most_square(count, 1) if count else (1, 1) for count in counts]
        return {"images_spatial_crop": torch.tensor(grids)}
    name = "num_patches" if type(wrapped).__name__ == "Step3VLTower" else "num_local_patches"
    return {name: torch.tensor(counts)}


def _most_square(size: int, factor: int) -> tuple[int, int]:
    """The two sides of an area, multiples of a factor, that differ least."""
    area = size // factor**2
    side = next(side for side in range(isqrt(area), 0, -1) if area % side == 0)
    return side * factor, area // side * factor
