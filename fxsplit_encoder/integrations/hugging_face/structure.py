"""What of a tower a capture would leave out, and where its parameters are."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fxsplit_encoder._torch.structure import Structure

_SHOWN = {"hook": "a hook", "forward": "another forward"}


def foreign_code(tower: nn.Module, structure: Structure) -> str | None:
    """What of a tower a capture of its modules' own forwards would leave out; None: nothing."""
    for name, what in structure.additions:
        return f"{_SHOWN[what]} of {name}"
    for name, module in tower.named_modules():
        if is_parametrized(module):
            return f"the parametrization of {name}"
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return None
    named = tower.named_modules()
    layers = (
        f"the adapter layer {name}" for name, module in named if isinstance(module, tuners.BaseTunerLayer)
    )
    return next(layers, None)


def is_in_one_place(tower: nn.Module) -> bool:
    """Whether all parameters are on one device that has them: those that accelerate offloads are nowhere
    between two calls.
    """
    devices = {parameter.device for parameter in tower.parameters()}
    return len(devices) == 1 and next(iter(devices)).type != "meta"
