"""Towers and programs in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from fxsplit_encoder.cli.console import dtype_name
from fxsplit_encoder.compile import BoundProgram


def describe_tower(tower: torch.nn.Module) -> str:
    """Depth, width, size and dtype of a tower."""
    parameters = sum(parameter.numel() for parameter in tower.parameters())
    dtype = dtype_name(next(tower.parameters()).dtype)
    stacks = " and ".join(_describe_stack(config) for config in _stacks(tower))
    return f"{stacks}, {parameters / 1e6:.0f} M parameters, {dtype}"


def _stacks(tower: Any) -> list[Any]:
    """The configurations of its stacks of blocks."""
    inner = next((getattr(tower, n) for n in ("vision_tower", "vision_model") if hasattr(tower, n)), tower)
    config: Any = getattr(inner, "config", None) or tower.config
    return [config.sam, config.clip] if hasattr(config, "clip") else [config]


def _describe_stack(config: Any) -> str:
    names = ("depth", "num_hidden_layers", "num_layers")
    blocks = next(getattr(config, name) for name in names if hasattr(config, name))
    # Where there is an `embed_dim`, it is the width of the blocks, and `hidden_size` the language model's.
    return f"{blocks} blocks, width {getattr(config, 'embed_dim', config.hidden_size)}"


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
