"""Finds the vision towers of a model of transformers, accelerates them in place, and restores them."""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

from fxsplit_encoder._torch.dynamo import original_module
from fxsplit_encoder._torch.transformers import INNER_FORWARD, device_hook
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError, UnsupportedTowerError
from fxsplit_encoder.hugging_face.rules import calls_of, is_named, names_images, takes_images
from fxsplit_encoder.hugging_face.served import FoundTower, ServedTower
from fxsplit_encoder.messages import shown
from fxsplit_encoder.towers.base import WrappedTower
from fxsplit_encoder.towers.rules import is_model

logger = logging.getLogger(__name__)

Model = TypeVar("Model")
Config = EncoderConfig | Mapping[str, Any] | str | os.PathLike[str]


def accelerate(model: Model, config: Config | None = None) -> Model:
    """Replaces the forward of the vision towers in a model of transformers by one that encodes by captures.

    Callers of the towers (`generate`, a pipeline, `get_image_features`) get outputs of the same classes.
    Captures are made when a tower is called first, or by `warmup`. Calls that captures do not serve, such as
    those in training, go to the tower's own forward and are counted: `stats(model)`.

    Args:
        model: is changed in place.
        config: an `EncoderConfig`, its fields in a mapping, or a YAML file.

    Returns:
        The model; unchanged if it is accelerated in the same way already.

    Raises:
        InputError: it is no model, or its tower is wrapped.
        UnsupportedTowerError: none of its towers can be served; says of each why.
        ConfigError: a setting is wrong.
    """
    settings = EncoderConfig.from_options({} if config is None else {"config": config})
    towers, refusals = find_towers(model)
    served = [_served_by(found.module) for found in towers]
    if all(each is not None and each.config == settings for each in served):
        return model
    for refusal in refusals:
        logger.warning("accelerate: left alone: %s", refusal)
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

_MOST_NAMED = 8
"""Modules that an error names, where none is a vision tower."""


class Refusal(NamedTuple):
    """A vision tower that is not served, by its dotted name and class, and why."""

    name: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind}): {self.reason}"


def find_towers(model: Any) -> tuple[list[FoundTower], list[Refusal]]:
    """The towers of a model that can be served, each once, and those that cannot; InputError if it is no
    module or a tower is wrapped, UnsupportedTowerError if none is served.
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
    refusals: list[Refusal] = []
    found = list(_find(model, "", model, refusals))
    if found:
        return found, refusals
    kind = type(model).__name__
    if refusals:
        raise UnsupportedTowerError(
            f"accelerate: {kind} has no vision tower that can be served: {'; '.join(map(str, refusals))}. "
            "Wrap it by wrap(tower, DenseTowerSpec(...)), or by its own adapter, for EncoderCudaGraphManager "
            "or torch.compile(backend='encoder_cg')"
        )
    models = [f"{name or 'the model'} ({type(each).__name__})" for name, each in model.named_modules()]
    models = [*models[:_MOST_NAMED], *(["..."] if len(models) > _MOST_NAMED else [])]
    raise UnsupportedTowerError(
        f"accelerate: no vision tower was found in {kind}: none of its modules takes pixel_values first; "
        f"looked at {', '.join(models)}"
    )


def _find(module: nn.Module, name: str, owner: nn.Module, refusals: list[Refusal]) -> Iterator[FoundTower]:
    """The towers below a module, nearest first; `owner` is the last module that names layers to read.
    Where none is below a tower that is refused, its reason is added to `refusals`.
    """
    layers = () if owner is module else _layers_of(owner)
    reason = ""
    if is_named(module) or (takes_images(module) and not any(map(is_named, module.modules()))):
        try:
            calls = calls_of(module)
        except UnsupportedTowerError as error:
            reason = str(error) if names_images(module) and is_model(module) else ""
        else:
            yield FoundTower(name, module, layers, calls)
            return
    if _layers_of(module):
        owner = module
    num_refused, found = len(refusals), False
    for key, child in module.named_children():
        for tower in _find(child, f"{name}.{key}" if name else key, owner, refusals):
            found = True
            yield tower
    if reason and not found and len(refusals) == num_refused:
        refusals.append(Refusal(name, type(module).__name__, reason))


def _layers_of(owner: nn.Module) -> tuple[int, ...]:
    config = getattr(owner, "config", None)
    for name in ("vision_feature_layer", "vision_feature_layers"):
        layers = getattr(config, name, None)
        if layers is not None:
            return (layers,) if isinstance(layers, int) else tuple(layers)
    return ()
