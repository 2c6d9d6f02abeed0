"""Which function makes a random call of an operation."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ..builder import Builder

Call = Callable[[Builder], fx.Node | None]
"""Appends a call to a graph; None where the trace refuses the arguments that were drawn."""

CALLS: dict[str, Call] = {}
"""By the names that rules go by."""
WITHOUT_RULES: dict[str, Call] = {}
"""Operations that mix rows in ways of their own, to which no rule may lend its name."""


def call_of(*names: str) -> Callable[[Callable[[Builder, str], fx.Node | None]], Call]:
    """Makes a function of a builder and an operation's name the random call of these operations."""

    def register(function: Callable[[Builder, str], fx.Node | None]) -> Call:
        for name in names:
            assert name not in CALLS, name
            CALLS[name] = lambda builder, name=name: function(builder, name)  # type: ignore[misc]
        return function  # type: ignore[return-value]

    return register


def call_without_rule(name: str) -> Callable[[Call], Call]:
    """Makes a function the random call of an operation that has no rule."""

    def register(function: Call) -> Call:
        WITHOUT_RULES[name] = function
        return function

    return register
