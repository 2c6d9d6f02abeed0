"""The tower that a command works on: of a checkpoint, or of a published model's size with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxsplit_encoder.cli.document import shipped
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import nearest
from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.eager import as_tensors
from fxsplit_encoder.models.family import Family
from fxsplit_encoder.models.load import device_of, dtype_of, load_tower, read_family
from fxsplit_encoder.models.prepare import (
    EncoderInputs,
    Preparation,
    ProcessorSettings,
    find_files,
    load_inputs,
)
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.models.registry import ARCHITECTURES


class Batch(NamedTuple):
    """Items that are encoded together."""

    row: dict[str, Any]
    """Their names and sizes in a table."""
    mm_kwargs: dict[str, Any]


@dataclass
class ChosenTower:
    """A tower, and what makes its inputs."""

    title: str
    """Whose it is, in words."""
    family: Family
    preparation: Preparation
    device: torch.device
    dtype: torch.dtype
    load: Callable[[], Any]
    """Makes the module, which takes a while."""

    @functools.cached_property
    def module(self) -> Any:
        """What `wrap` takes; made when it is asked for first."""
        return self.load()

    @property
    def _adapter(self) -> Any:
        return self.family.eager_tower(self.module).adapter

    def inputs(self, images: Sequence[Path]) -> EncoderInputs:
        """The batch of images, clips and directories of them, with its pixels on the device; of none: of the
        photographs that come with the package, and of the clip, if the model takes any. InputError: a file is
        not usable.
        """
        kinds = ("images", "videos") if self.preparation.takes_clips else ("images",)
        files = find_files(images or [shipped(f"examples/{kind}") for kind in kinds])
        return load_inputs(files, self.preparation).to(self.device, self.dtype)

    def tokens(self, inputs: EncoderInputs) -> list[int]:
        """The output tokens of every item."""
        specs = self._adapter.get_encoder_cudagraph_item_specs(inputs.mm_kwargs)
        return [spec.output_tokens for spec in specs]

    def batches(self, inputs: EncoderInputs, indices: Sequence[int]) -> list[Batch]:
        """Some items of a batch, each alone, and the whole batch."""
        tokens = self.tokens(inputs)
        select = self._adapter.select_encoder_cudagraph_items
        batches = []
        for index in indices:
            item = inputs.items[index]
            row = {"item": item.key, "size": item.pixels, item.unit: item.size, "tokens": tokens[index]}
            batches.append(Batch(row, as_tensors(select(inputs.mm_kwargs, [index]))))
        together = {"item": f"all {len(inputs.items)}", "size": None, "tokens": sum(tokens)}
        return [*batches, Batch(together, inputs.mm_kwargs)]


def choose_tower(model: str, blocks: int | None, device: str, dtype: str) -> ChosenTower:
    """Chooses a published model's tower with random weights and so many blocks (None: the model's own), or
    that of a checkpoint. InputError: there is no such tower or device, or `blocks` of a checkpoint.
    """
    if is_checkpoint(model):
        if blocks is not None:
            raise InputError("--blocks: only for a tower with random weights; leave it out, or name one")
        return checkpoint_tower(model, device, dtype)
    place = choose_device(device)
    known, own_dtype = ARCHITECTURES[model], dtype_of(dtype, place)
    preparation = known.family.prepare(known.settings(blocks), ProcessorSettings())
    load = functools.partial(demo_tower, blocks, place, own_dtype, model=model)
    return ChosenTower(f"{known.title}'s, random weights", known.family, preparation, place, own_dtype, load)


def checkpoint_tower(model: str, device: str, dtype: str) -> ChosenTower:
    """The tower of a checkpoint; arguments and errors as of `choose_tower`."""
    place = choose_device(device)
    checkpoint, own_dtype = locate(model), dtype_of(dtype, place)
    family, settings = read_family(checkpoint)
    preparation = family.prepare(settings, checkpoint.processors())
    load = functools.partial(load_tower, checkpoint, own_dtype, place)
    return ChosenTower(model, family, preparation, place, own_dtype, load)


def choose_device(name: str) -> torch.device:
    """The device that an option means, see `device_of`. A GPU that is named by its number becomes the current
    one.
    """
    device = device_of(name, "--device")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # of streams and events that are made without saying where
    return device


def locate(model: str) -> Checkpoint:
    """The checkpoint of a directory or hub name; InputError, which lists all names: it is neither."""
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
