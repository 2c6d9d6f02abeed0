"""Weights that vLLM loads into a model that runs (`reload_weights`, weight transfer)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def note_reloads(model: nn.Module, then: Callable[[], None]) -> None:
    """Has every later `model.load_weights` call `then` at its end.

    vLLM copies new weights through `parameter.data`, which leaves no version, some of them after that end and
    before the next request. Calling it again for a model changes nothing but what is called.
    """
    load: Any = getattr(model, "load_weights", None)
    if load is None:
        return
    if hasattr(load, "after_load"):
        load.after_load = then
        return

    @functools.wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        finally:
            load_weights.after_load()  # type: ignore[attr-defined]

    load_weights.after_load = then  # type: ignore[attr-defined]
    model.load_weights = load_weights  # type: ignore[assignment]
