"""Which function makes a random call of an operation."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ..builder import Builder

Call = Callable[[Builder], fx.Node | None]
"""Appends a call to a graph; None where the trace refuses the arguments that were drawn."""

CALLS: dict[str, Call] = {}
"""By the names that rules go by."""


def call_of(*names: str) -> Callable[[Callable[[Builder, str], fx.Node | None]], Call]:
    """Makes a function of a builder and an operation's name the random call of these operations."""

    def register(function: Callable[[Builder, str], fx.Node | None]) -> Call:
        for name in names:
            assert name not in CALLS, name
            CALLS[name] = lambda builder, name=name: function(builder, name)  # type: ignore[misc]
        return function  # type: ignore[return-value]

    return register
