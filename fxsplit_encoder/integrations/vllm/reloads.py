"""Weights that vLLM loads into a model that runs (`reload_weights`, weight transfer)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version


def note_reloads(model: nn.Module, then: Callable[[], None]) -> None:
    """Has every later `model.load_weights` leave a trace in the versions of the parameters, and call `then`.

    vLLM copies new weights through `parameter.data`, which has a version of its own, so whoever keeps a
    weight in another form would not see that it changed. Calling it again for a model changes nothing but
    what is called.
    """
    load: Any = getattr(model, "load_weights", None)
    if load is None:
        return
    if hasattr(load, "after_load"):
        load.after_load = then
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
            load_weights.after_load()  # type: ignore[attr-defined]

    load_weights.after_load = then  # type: ignore[attr-defined]
    model.load_weights = load_weights  # type: ignore[assignment]
