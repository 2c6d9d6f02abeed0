"""Which part of a model is its tower, where the whole model is handed over, its language model with it.

vLLM's models name the modules of their towers, in two places. Neither is complete: of two kinds of towers
`_tower_model_names` keeps the names of the second, and what joins a tower to the language model is a
"connector" of `get_mm_mapping()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.device import indexed

# vLLM sets it on a model while it builds its towers.
_MARKED = "_tower_model_names"


def tower_part(tower: object) -> nn.Module | None:
    """The modules of a model that it names as those of its towers; all of it where it names none; None for
    what is no module.
    """
    if not isinstance(tower, nn.Module):
        return None
    modules = _named_modules(tower)
    return nn.ModuleList(modules) if modules else tower


def tower_tensors(tower: object) -> list[Tensor]:
    """The parameters and buffers of a model's towers, and those that the model holds itself."""
    part = tower_part(tower)
    if part is None:
        return []
    assert isinstance(tower, nn.Module)
    own = [*tower.parameters(recurse=False), *tower.buffers(recurse=False)] if part is not tower else []
    return [*part.parameters(), *part.buffers(), *own]


def named_tensors(tower: object) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by every name that they have; none of what is no module."""
    if not isinstance(tower, nn.Module):
        return {}
    both = (*tower.named_parameters(remove_duplicate=False), *tower.named_buffers(remove_duplicate=False))
    return dict(both)


def placement_of(
    tower: object, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """Where and in what a tower computes: as is given, else as its first parameter."""
    part = tower_part(tower)
    parameter = next(part.parameters(), None) if part is not None else None
    if device is None:
        device = parameter.device if parameter is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = parameter.dtype if parameter is not None else torch.get_default_dtype()
    return indexed(torch.device(device)), dtype


def _named_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of the towers, none inside another."""
    names = sorted(_tower_names(model))
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    modules = dict(model.named_modules())
    return [modules[name] for name in outermost if name in modules]


def _tower_names(model: Any) -> set[str]:
    mapping = model.get_mm_mapping() if hasattr(model, "get_mm_mapping") else None
    listed = [getattr(model, _MARKED, ())]
    listed += [getattr(mapping, kind, ()) for kind in ("tower_model", "connector")]
    return {name.rstrip(".") for names in listed for name in names}
