"""Towers of published models beside `cli.architectures`, with random weights: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from fxsplit_encoder.cli.models import distribution
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.models.moonvit import KimiVLVisionConfig, KimiVLVisionModel

_INITIALIZER_RANGE = 0.02


@dataclass(frozen=True)
class RealTower:
    """A tower of published size."""

    blocks: int
    """Its depth."""

    make: Callable[[int], nn.Module]
    """What `wrap` takes, with so many blocks."""


REAL_TOWERS: Mapping[str, RealTower] = {
    "kimi-k2.5": RealTower(27, lambda n: Kimi_K25VisionModel(Kimi_K25VisionConfig(num_hidden_layers=n))),
    "kimi-vl-a3b": RealTower(27, lambda n: KimiVLVisionModel(KimiVLVisionConfig(num_hidden_layers=n))),
}
"""By the name that `real_tower` takes."""


@torch.no_grad()
def real_tower(
    name: str,
    blocks: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Build a tower of `REAL_TOWERS` with random weights, at its true width.

    Args:
        name: of the model.
        blocks: its depth, at most the model's own; None: the model's own.
        device: where its weights are drawn; on "meta" it has none.
        dtype: of the parameters. Buffers keep theirs: positions and frequencies are computed in float32.
        seed: the same weights for the same seed, on one kind of device.

    Raises:
        InputError: no such name, or more blocks than the model has, or none.
    """
    if name not in REAL_TOWERS:
        raise InputError(f"tower: expected one of {', '.join(REAL_TOWERS)}; got {name!r}")
    known = REAL_TOWERS[name]
    if blocks is not None and not 1 <= blocks <= known.blocks:
        raise InputError(f"blocks: expected 1 to {known.blocks} for {name}; got {blocks}")
    device = torch.device(device)
    # Not on "meta" first, as the command does: what no checkpoint holds, some of these towers compute when
    # they are made.
    with device:
        tower = known.make(known.blocks if blocks is None else blocks)
    generator = torch.Generator(device).manual_seed(seed) if device.type != "meta" else None
    for parameter_name, parameter in tower.named_parameters():
        if generator is not None:
            mean, deviation = distribution(parameter_name, parameter.dim(), _INITIALIZER_RANGE)
            parameter.normal_(mean, deviation, generator=generator)
        parameter.data = parameter.data.to(dtype)
    return tower.requires_grad_(False).train(False)
