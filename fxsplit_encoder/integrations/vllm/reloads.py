"""Weights that vLLM loads into a model that runs (`reload_weights`, weight transfer)."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version


def note_reloads(model: nn.Module) -> None:
    """Has every later `model.load_weights` leave a trace in the versions of the parameters.

    vLLM copies new weights through `parameter.data`, which has a version of its own, so whoever keeps a
    weight in another form would not see that it changed. Calling it again changes nothing.
    """
    load: Any = getattr(model, "load_weights", None)
    if load is None or hasattr(load, "notes_reloads"):
        return
    # Those of now: while vLLM loads, modules hold others, and what was loaded is copied into these later.
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]

    @functools.wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        finally:
            now = (reference() for reference in parameters)
            increment_version([parameter for parameter in now if parameter is not None])

    load_weights.notes_reloads = True  # type: ignore[attr-defined]
    model.load_weights = load_weights  # type: ignore[assignment]
