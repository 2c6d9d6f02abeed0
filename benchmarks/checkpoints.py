"""Checkpoints with random weights, for what takes nothing but a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fxsplit_encoder.models.family import Family
from fxsplit_encoder.models.random import draw_weights


def random_checkpoint(
    directory: Path, family: Family, settings: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> Path:
    """The vision tower of a model as a new directory, without the rest of the model.

    Args:
        directory: which does not exist yet.
        family: of the tower.
        settings: its config.json.
        dtype: of the weights.
    """
    tower = family.empty_tower(settings, torch.device("cpu"))
    draw_weights(tower, 0)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    prefix = next(iter(family.prefixes))
    save_file(
        {f"{prefix}{name}": each.to(dtype, copy=True) for name, each in tower.named_parameters()},
        directory / "model.safetensors",
    )
    return directory
