"""The guards of a trace on its symbols: Dynamo checks them on its own path, which ours bypasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch import fx

from fxsplit_encoder.compile.sizes import Size, SymbolValues


def assumptions_of(inputs: Sequence[fx.Node]) -> list[sympy.Basic]:
    """What a trace assumes of its symbols, as expressions.

    Args:
        inputs: the inputs of the traced graph.
    """
    shape_env = _shape_env(inputs)
    # Of symbols that are known to be equal the graph uses one.
    return [] if shape_env is None else [shape_env.replace(guard.expr) for guard in shape_env.guards]


def _shape_env(inputs: Sequence[fx.Node]) -> Any:
    """Where the trace keeps its symbols; None for a graph whose inputs have none."""
    return next(
        (n.meta["val"].fake_mode.shape_env for n in inputs if hasattr(n.meta["val"], "fake_mode")), None
    )


def holds_for_capture(
    accepts: Callable[[SymbolValues], bool], token_symbol: str, divisor: int, values: SymbolValues
) -> bool:
    """Whether a graph may be captured at these sizes: its trace holds for them, or for twice the tokens.

    A trace takes no size for 1, which broadcasts and is contiguous in any layout; the graph itself has no
    such case. Its run of n tokens is what the first n of 2n give, as `compile.padding` shows or the tower
    declares.

    Args:
        divisor: what divides the token count wherever the trace holds.
    """
    tokens = values[token_symbol]
    return accepts(values) or (tokens % divisor == 0 and accepts({**values, token_symbol: 2 * tokens}))


def guards_of(inputs: Sequence[fx.Node], independent: str | None = None) -> Callable[[SymbolValues], bool]:
    """Whether a trace holds for given values of symbols, as a function of them.

    Dynamo lets symbols begin at 2. One that counts independent rows may be 1: a run of one row is the first
    row of a run of two.

    Args:
        inputs: the inputs of the traced graph.
        independent: the symbol that counts independent rows, if any.
    """
    shape_env = _shape_env(inputs)
    if shape_env is None:
        return lambda values: True
    bounds = {str(symbol): (bound.lower, bound.upper) for symbol, bound in shape_env.var_to_range.items()}
    if independent in bounds and bounds[independent][0] == 2:
        bounds[independent] = (1, bounds[independent][1])
    conditions = [Size(g.expr) for g in shape_env.guards if not g.expr.is_Boolean or g.expr.free_symbols]

    def accepts(values: SymbolValues) -> bool:
        within = all(
            bool(bounds[symbol][0] <= value) and bool(value <= bounds[symbol][1])
            for symbol, value in values.items()
            if symbol in bounds
        )
        known = (condition for condition in conditions if set(condition.symbols) <= values.keys())
        try:
            return within and all(bool(condition(values)) for condition in known)
        except ZeroDivisionError:  # s % (s // 4) == 0, of fewer than four
            return False

    return accepts
