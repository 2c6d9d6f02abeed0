"""Accelerating a model of transformers in place, and undoing it."""

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
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.hugging_face.captured import Settings
from fxsplit_encoder.hugging_face.find import find_towers
from fxsplit_encoder.hugging_face.served import ServedTower
from fxsplit_encoder.messages import shown

Model = TypeVar("Model")
Config = EncoderConfig | Mapping[str, Any] | str | os.PathLike[str]

_FORWARD = "forward"
"""Where a module has a forward of its own."""


def accelerate(model: Model, config: Config | None = None, *, compile: bool = False) -> Model:
    """Has the vision towers of a model of transformers encode by captures; everything else stays as it is.

    Callers of the towers (`generate`, a pipeline, `get_image_features`) get what they got before, of the same
    classes. Captures are made when a tower is called first, or by `warmup`. Calls that captures do not serve,
    such as those in training, go to the tower's own forward and are counted: `stats(model)`.

    Args:
        model: is changed in place, by nothing but the forward of its towers.
        config: how towers are captured: an `EncoderConfig`, its fields in a mapping, or a YAML file.
        compile: whether towers go behind `torch.compile(backend="encoder_cg")`, rather than into an
            `EncoderCudaGraphManager`.

    Returns:
        The model. One that is accelerated in the same way already stays so.

    Raises:
        InputError: it is no model, or its tower is wrapped.
        UnsupportedTowerError: none of its towers is known.
        ConfigError: a setting is wrong.
    """
    settings = Settings(_read_config(config), compile)
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
    """Undoes `accelerate`, if it was done, and frees the memory of captures. Returns the model; InputError if
    it is none.
    """
    for module, served in served_towers_of(model):
        for name in (_FORWARD, INNER_FORWARD):
            if vars(module).get(name) is served:
                _put_back(module, name, served)
        served.close()
    return model


def served_towers_of(model: Any) -> list[tuple[nn.Module, ServedTower]]:
    """The towers of a model that are accelerated; InputError if it is no model."""
    if not isinstance(model, nn.Module):
        raise InputError(f"restore: expected a model of transformers; got {shown(model)}")
    return list(_walk(original_module(model)))


def _walk(model: nn.Module) -> Iterator[tuple[nn.Module, ServedTower]]:
    for module in model.modules():
        served = _served_by(module)
        if served is not None:
            yield module, served


def _served_by(module: nn.Module) -> ServedTower | None:
    own = (vars(module).get(name) for name in (_FORWARD, INNER_FORWARD))
    return next((each for each in own if isinstance(each, ServedTower)), None)


def _slot(module: nn.Module) -> str:
    """Where a module's forward is put: inside of accelerate's hooks, which bring the inputs to it."""
    return INNER_FORWARD if INNER_FORWARD in vars(module) and device_hook(module) is not None else _FORWARD


def _previous(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that a module has for itself there; None: its class's."""
    previous = vars(module).get(_slot(module))
    return None if previous is None or _is_class_forward(previous, module) else previous


def _is_class_forward(forward: Any, module: nn.Module) -> bool:
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def _put_back(module: nn.Module, name: str, served: ServedTower) -> None:
    if name == INNER_FORWARD:
        setattr(module, name, served.own_forward)
    elif served.previous is None:
        delattr(module, name)
    else:
        setattr(module, name, served.previous)


def _read_config(config: Config | None) -> EncoderConfig:
    return EncoderConfig.from_options({} if config is None else {"config": config})
