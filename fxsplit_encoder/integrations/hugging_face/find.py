"""The vision towers of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxsplit_encoder._torch.dynamo import original_module
from fxsplit_encoder.errors import InputError, UnsupportedTowerError
from fxsplit_encoder.integrations.hugging_face.families import is_served, served_towers
from fxsplit_encoder.messages import shown
from fxsplit_encoder.towers.base import WrappedTower

_LAYERS = ("vision_feature_layer", "vision_feature_layers")


@dataclass(frozen=True)
class FoundTower:
    """A tower in a model."""

    name: str
    """Where it is, with dots; empty if it is the model itself."""
    module: nn.Module
    layers: tuple[int, ...]
    """The layers whose hidden states the model around it reads, as its configuration says."""


def find_towers(model: Any) -> list[FoundTower]:
    """The towers of a model that can be served, each once.

    Raises:
        InputError: it is no module, or one that is wrapped already.
        UnsupportedTowerError: it has none.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"accelerate: expected a model of transformers; got {shown(model)}")
    model = original_module(model)
    for name, module in model.named_modules():
        if isinstance(module, WrappedTower):
            raise InputError(
                f"accelerate: expected a model as it was loaded; got one whose {name or 'tower'} is wrapped; "
                "put the tower itself back, which is its attribute `tower`"
            )
    found = list(_walk(model, "", model))
    if not found:
        raise UnsupportedTowerError(
            f"accelerate: {type(model).__name__} has no vision tower that is known; expected one of "
            f"{', '.join(served_towers())}. Wrap another by wrap(tower, DenseTowerSpec(...)), or by its own "
            "adapter, for EncoderCudaGraphManager or torch.compile(backend='encoder_cg')"
        )
    return found


def _walk(module: nn.Module, name: str, owner: nn.Module) -> Iterator[FoundTower]:
    """The towers below a module, nearest first; `owner` is the last module that names layers to read."""
    if is_served(module):
        yield FoundTower(name, module, () if owner is module else _layers_of(owner))
        return
    if _layers_of(module):
        owner = module
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key, owner)


def _layers_of(owner: nn.Module) -> tuple[int, ...]:
    config = getattr(owner, "config", None)
    for name in _LAYERS:
        layers = getattr(config, name, None)
        if layers is not None:
            return (layers,) if isinstance(layers, int) else tuple(layers)
    return ()
