"""Towers and programs in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from fxsplit_encoder.cli.console import dtype_name
from fxsplit_encoder.compile import BoundProgram


def describe_tower(tower: torch.nn.Module) -> str:
    """Depth, width, size and dtype of a tower."""
    config: Any = tower.config
    parameters = sum(parameter.numel() for parameter in tower.parameters())
    dtype = dtype_name(next(tower.parameters()).dtype)
    # Where there is an `embed_dim`, it is the width of the blocks, and `hidden_size` the language model's.
    width = getattr(config, "embed_dim", config.hidden_size)
    return f"{config.depth} blocks, width {width}, {parameters / 1e6:.0f} M parameters, {dtype}"


def describe_split(path: str, bound: BoundProgram | None) -> str:
    """Where a path's program was split, in a line."""
    where = "" if path == "default" else f"{path}: "
    if bound is None:
        return f"{where}none, this path runs eagerly"
    program = bound.program
    cuts = Counter(operator_name(step.call) for step in program.splits)
    at = ", ".join(f"{count} x {name}" for name, count in cuts.items()) or "nothing"
    return f"{where}{len(program.pieces)} pieces, {program.num_distinct} distinct, cut at {at}"


def operator_name(call: Any) -> str:
    """An operator as the configuration writes it."""
    return str(call.name()).removesuffix(".default") if hasattr(call, "name") else str(call)
