"""Towers of a published model's sizes with random weights, and random inputs for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isqrt
from typing import Any

import torch
from torch import nn

from fxsplit_encoder.models.registry import architecture
from fxsplit_encoder.towers.cropped import DeepseekOcrTower
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.tiles import DenseTower, TiledTower

DEMO_MODEL = "qwen3-vl-8b"
_INITIALIZER_RANGE = 0.02
# Learned positions, as the models name them.
_POSITIONS = re.compile(r"pos(_|ition)")


def demo_tower(
    blocks: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    model: str = DEMO_MODEL,
) -> Any:
    """Build a model's vision tower with random weights, at its true width.

    Args:
        blocks: its depth; None: the model's own.
        device: where its weights are drawn; on "meta" it has none.
        dtype: of the parameters. Buffers keep theirs: positions and frequencies are computed in float32.
        model: a name of `models.registry.ARCHITECTURES`.

    Raises:
        InputError: no such model, or more blocks than it has, or none.
    """
    known = architecture(model)
    device = torch.device(device)
    tower = known.family.empty_tower(known.settings(blocks), device)
    if device.type != "meta":
        draw_weights(tower, 0)
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    return tower


@torch.no_grad()
def draw_weights(tower: nn.Module, seed: int) -> None:
    """Random weights, biases and positions, none of them faint."""
    generator: torch.Generator | None = None
    for name, parameter in tower.named_parameters():
        generator = generator or torch.Generator(parameter.device).manual_seed(seed)
        mean, deviation = _distribution(name, parameter.dim())
        parameter.normal_(mean, deviation, generator=generator)


def _distribution(name: str, num_dims: int) -> tuple[float, float]:
    """Mean and deviation of a parameter. Biases of zero and faint positions, the usual ones, hide faults."""
    if name.endswith(".bias"):
        return 0.0, 0.1
    if num_dims == 1:  # of a norm, or a layer's scale
        return 1.0, 0.1
    return 0.0, 0.5 if _POSITIONS.search(name) else _INITIALIZER_RANGE


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
        pixels_key, grids_key = wrapped.input_keys[0]
        grids = [_most_square(size, wrapped.merge_size) for size in sizes]
        listed = [(1, *grid) for grid in grids] if grids_key.endswith("thw") else grids
        patches = pixels(sum(sizes), wrapped.patch_features)
        return {pixels_key: patches, grids_key: torch.tensor(listed, device="cpu")}
    if isinstance(wrapped, DenseTower):
        tiles = pixels(sum(sizes), *wrapped.tile_shape)
        return {wrapped.input_name: tiles, wrapped.count_keys[0]: torch.tensor(sizes, device="cpu")}
    assert isinstance(wrapped, TiledTower)
    counts = {"global": len(sizes), "local": sum(sizes)}
    views = {view.input_name: pixels(counts[path], *view.shape) for path, view in wrapped.views.items()}
    crops: Sequence[object] = sizes
    if isinstance(wrapped, DeepseekOcrTower):  # which reads grids
        crops = [_most_square(count, 1) if count else (1, 1) for count in sizes]
    return {**views, wrapped.count_key: torch.tensor(crops, device="cpu")}


def _most_square(size: int, factor: int) -> tuple[int, int]:
    """The two sides of an area, multiples of a factor, that differ least."""
    area = size // factor**2
    side = next(side for side in range(isqrt(area), 0, -1) if area % side == 0)
    return side * factor, area // side * factor
