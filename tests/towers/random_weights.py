"""Random weights none of which is faint, so that faults show."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_NORMS = ("norm", "neck.1", "neck.3", "ln_q", "lambda")
"""What names layer norms, and scales of branches, in the towers."""


def randomize(module: nn.Module, seed: int = 0, deviation: float | None = None) -> Any:
    """The module itself, without gradients and in inference mode, with other weights for every seed.

    Args:
        deviation: Of matrices; by default that with which rows keep their size.
    """
    generator = torch.Generator().manual_seed(1000 + seed)  # not those of the pixels
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(*_distribution(name, parameter, deviation), generator=generator)
    return module.requires_grad_(False).train(False)


def _distribution(name: str, parameter: torch.Tensor, deviation: float | None) -> tuple[float, float]:
    """The mean and the deviation of a parameter's entries."""
    if name.endswith("bias"):
        return 0.0, 0.1
    if any(part in name for part in _NORMS):
        return 1.0, 0.1
    if parameter.dim() < 2 or "pos" in name or "class" in name:
        return 0.0, 0.5
    return 0.0, deviation or parameter[0].numel() ** -0.5
