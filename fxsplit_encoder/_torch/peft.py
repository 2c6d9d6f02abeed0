"""PEFT's adapter layers: which of their adapters a forward computes with."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

ACTIVE = "_active_adapter"
"""Where a layer keeps the names of its active adapters, whether or not they are disabled."""

MERGED = "merged_adapters"

SWITCHES = (ACTIVE, "_disable_adapters", MERGED, "scaling")
"""Where a layer keeps what is changed from call to call."""

_UNREAD = frozenset(("kwargs",))
"""Where a layer keeps arguments of its constructor, with its own name, which its forward does not read."""

_UNREAD_OF_LORA = _UNREAD | {"r", "lora_alpha", "use_dora", "use_rslora", "lora_bias"}
"""The same for LoRA without a variant such as DoRA: rank and alpha are read only when `scaling` is set."""


def is_adapter_layer(module: object) -> bool:
    """Whether a module is an adapter layer around another."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")  # without it there is none
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def unread_of(layer: Any) -> Collection[str]:
    """Returns the names of attributes of an adapter layer that its forward does not read."""
    is_lora = "lora_A" in layer.adapter_layer_names and not vars(layer).get("lora_variant", True)
    return _UNREAD_OF_LORA if is_lora else _UNREAD


def adapters_of(layer: Any) -> list[nn.Module]:
    """Returns the containers of an adapter layer, each of modules by the names of adapters, in any order."""
    held = (getattr(layer, name, None) for name in layer.adapter_layer_names)
    return [each for each in held if isinstance(each, nn.ModuleDict)]


def adapters_in_use(layer: Any) -> list[str]:
    """Names of the adapters that a layer computes with: none if they are disabled or merged."""
    return [] if layer.disable_adapters or layer.merged else list(layer.active_adapters)


def values_in_use(layer: Any, name: str, value: Any) -> Any:
    """Returns an attribute of a layer without what it holds of adapters that are not in use."""
    used = adapters_in_use(layer)
    if name == ACTIVE:
        return used
    if name in layer.other_param_names and isinstance(value, dict):
        return {key: each for key, each in value.items() if key in used}
    return value


def copies_of_values(layer: Any) -> dict[str, Any]:
    """Copies what PEFT writes into a layer's dictionaries and lists: the layer has its state there."""
    names = (*layer.other_param_names, "lora_variant", MERGED)
    values = {name: vars(layer).get(name) for name in names}
    return {name: copy.copy(value) for name, value in values.items() if isinstance(value, dict | list)}


def modules_out_of_use(modules: Iterable[nn.Module]) -> Collection[nn.Module]:
    """Returns the modules of adapters that the adapter layers among `modules` do not compute with."""
    unused: set[nn.Module] = set()
    layers: Iterable[Any] = filter(is_adapter_layer, modules)
    for layer in layers:
        used = adapters_in_use(layer)
        names = (*layer.adapter_layer_names, *layer.other_param_names)
        for held in (getattr(layer, name, None) for name in names):
            if isinstance(held, nn.ModuleDict):
                unused.update(m for key, each in held.items() if key not in used for m in each.modules())
    return unused


def unmerging_layer(tower: nn.Module) -> str | None:
    """Returns the first layer that is merged and disabled, so that its forward unmerges it; or None."""
    named: Iterable[tuple[str, Any]] = tower.named_modules()
    layers = ((name, module) for name, module in named if is_adapter_layer(module))
    return next((name for name, layer in layers if layer.disable_adapters and layer.merged), None)
