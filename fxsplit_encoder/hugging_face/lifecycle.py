"""Finds the vision towers of a model of transformers, accelerates them in place, and restores them."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from fxsplit_encoder._torch.dynamo import original_module
from fxsplit_encoder._torch.transformers import INNER_FORWARD, device_hook
from fxsplit_encoder.backend.entry import check_applies
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, UnsupportedTowerError
from fxsplit_encoder.hugging_face.calls import calls_of, served_towers
from fxsplit_encoder.hugging_face.captured import Settings
from fxsplit_encoder.hugging_face.served import FoundTower, ServedTower
from fxsplit_encoder.messages import shown
from fxsplit_encoder.towers.base import WrappedTower

Model = TypeVar("Model")
Config = EncoderConfig | Mapping[str, Any] | str | os.PathLike[str]


def accelerate(model: Model, config: Config | None = None, *, compile: bool = False) -> Model:
    """Replaces the forward of the vision towers in a model of transformers by one that encodes by captures.

    Callers of the towers (`generate`, a pipeline, `get_image_features`) get outputs of the same classes.
    Captures are made when a tower is called first, or by `warmup`. Calls that captures do not serve, such as
    those in training, go to the tower's own forward and are counted: `stats(model)`.

    Args:
        model: is changed in place.
        config: an `EncoderConfig`, its fields in a mapping, or a YAML file.
        compile: whether towers go behind `torch.compile(backend="encoder_cg")`, rather than into an
            `EncoderCudaGraphManager`.

    Returns:
        The model; unchanged if it is accelerated in the same way already.

    Raises:
        InputError: it is no model, or its tower is wrapped.
        UnsupportedTowerError: none of its towers is known.
        ConfigError: a setting is wrong.
    """
    settings = Settings(EncoderConfig.from_options({} if config is None else {"config": config}), compile)
    if compile:
        check_applies(settings.config)
    towers = find_towers(model)
    served = [_served_by(found.module) for found in towers]
    if all(each is not None and each.settings == settings for each in served):
        return model
    # All are made before any is put in its place, so that an error leaves the model as it was.
    restore(model)
    made = [(found.module, ServedTower(found, settings, _previous(found.module))) for found in towers]
    for module, tower in made:
        setattr(module, _slot(module), tower)
    return model


def restore(model: Model) -> Model:
    """Undoes `accelerate` and frees its captures. Returns the model; InputError if it is none."""
    for module, served in served_towers_of(model):
        if vars(module).get("forward") is served:
            if served.previous is None:
                del module.forward
            else:
                module.forward = served.previous
        if vars(module).get(INNER_FORWARD) is served:
            setattr(module, INNER_FORWARD, served.own_forward)
        served.close()
    return model


def served_towers_of(model: Any) -> list[tuple[nn.Module, ServedTower]]:
    """The towers of a model that are accelerated; InputError if it is no model."""
    if not isinstance(model, nn.Module):
        raise InputError(f"restore: expected a model of transformers; got {shown(model)}")
    pairs = ((module, _served_by(module)) for module in original_module(model).modules())
    return [(module, served) for module, served in pairs if served is not None]


def _served_by(module: nn.Module) -> ServedTower | None:
    own = (vars(module).get(name) for name in ("forward", INNER_FORWARD))
    return next((each for each in own if isinstance(each, ServedTower)), None)


def _slot(module: nn.Module) -> str:
    """The attribute for a module's new forward: inside accelerate's hooks, which move the inputs."""
    return INNER_FORWARD if INNER_FORWARD in vars(module) and device_hook(module) is not None else "forward"


def _previous(module: nn.Module) -> Callable[..., Any] | None:
    """The module's own forward there; None: its class's."""
    previous = vars(module).get(_slot(module))
    if isinstance(previous, types.MethodType) and previous.__self__ is module:
        return None if previous.__func__ is type(module).forward else previous
    return previous


# --- the towers of a model


def find_towers(model: Any) -> list[FoundTower]:
    """The towers of a model that can be served, each once; InputError if it is no module or a tower is
    wrapped, UnsupportedTowerError if there is none.
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
    found = list(_find(model, "", model))
    if not found:
        raise UnsupportedTowerError(
            f"accelerate: {type(model).__name__} has no vision tower that is known; expected one of "
            f"{', '.join(served_towers())}. Wrap another by wrap(tower, DenseTowerSpec(...)), or by its own "
            "adapter, for EncoderCudaGraphManager or torch.compile(backend='encoder_cg')"
        )
    return found


def _find(module: nn.Module, name: str, owner: nn.Module) -> Iterator[FoundTower]:
    """The towers below a module, nearest first; `owner` is the last module that names layers to read."""
    if calls_of(module) is not None:
        yield FoundTower(name, module, () if owner is module else _layers_of(owner))
        return
    if _layers_of(module):
        owner = module
    for key, child in module.named_children():
        yield from _find(child, f"{name}.{key}" if name else key, owner)


def _layers_of(owner: nn.Module) -> tuple[int, ...]:
    config = getattr(owner, "config", None)
    for name in ("vision_feature_layer", "vision_feature_layers"):
        layers = getattr(config, name, None)
        if layers is not None:
            return (layers,) if isinstance(layers, int) else tuple(layers)
    return ()
