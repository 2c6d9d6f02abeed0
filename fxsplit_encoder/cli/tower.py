"""The tower that a command works on: of a checkpoint, or of a published model's size with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import nearest
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.family import Family
from fxsplit_encoder.models.load import load_tower, read_family
from fxsplit_encoder.models.prepare import Preparation, ProcessorSettings
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.models.registry import ARCHITECTURES


@dataclass
class ChosenTower:
    """A tower, and what makes its inputs."""

    title: str
    """Whose it is, in words."""
    family: Family
    preparation: Preparation
    load: Callable[[], Any]
    """Makes the module, which takes a while."""

    @functools.cached_property
    def module(self) -> Any:
        """What `wrap` takes; made when it is asked for first."""
        return self.load()


def choose_tower(model: str, blocks: int | None, device: torch.device, dtype: torch.dtype) -> ChosenTower:
    """A published model's tower with random weights, or that of a checkpoint.

    Args:
        model: a name of `ARCHITECTURES`, a directory or a hub name.
        blocks: the depth of a tower with random weights; None: the model's own.
        device: where its parameters go.
        dtype: of its parameters.

    Raises:
        InputError: there is no such tower, or `blocks` is given for a checkpoint.
    """
    if not is_checkpoint(model):
        known = ARCHITECTURES[model]
        preparation = known.family.prepare(known.settings(blocks), ProcessorSettings())
        load = functools.partial(demo_tower, blocks, device, dtype, model=model)
        return ChosenTower(f"{known.title}'s, random weights", known.family, preparation, load)
    check_blocks(model, blocks)
    checkpoint = locate(model)
    family, settings = read_family(checkpoint)
    preparation = family.prepare(settings, checkpoint.processors())
    return ChosenTower(model, family, preparation, lambda: load_tower(checkpoint, dtype, device))


def check_blocks(model: str, blocks: int | None) -> None:
    """Raises InputError if `blocks` is given for a checkpoint."""
    if blocks is not None and is_checkpoint(model):
        raise InputError("--blocks: only for a tower with random weights; leave it out, or name one")


def locate(model: str) -> Checkpoint:
    """The checkpoint of a directory or hub name.

    Raises:
        InputError: it is neither; all names that may have been meant are listed.
    """
    try:
        return Checkpoint.locate(model)
    except InputError:
        names = list(ARCHITECTURES)
        raise InputError(
            f"--model {model}: no such directory or name; {nearest(model, names)}expected a checkpoint's "
            f"directory, a hub name such as owner/model, or one of {', '.join(names)}"
        ) from None


def is_checkpoint(model: str) -> bool:
    """Whether a name is not that of a tower with random weights."""
    return model not in ARCHITECTURES or Path(model).is_dir()
