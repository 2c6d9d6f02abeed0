"""The guards of a trace on its symbols: Dynamo checks them on its own path, which ours bypasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
from torch import fx

from fxsplit_encoder._torch.symbols import Symbols
from fxsplit_encoder.compile.sizes import Size, SymbolValues


def assumptions_of(inputs: Sequence[fx.Node]) -> list[sympy.Basic]:
    """What a trace assumes of its symbols, as expressions.

    Args:
        inputs: the inputs of the traced graph.
    """
    return Symbols(node.meta["val"] for node in inputs).assumptions


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
    symbols = Symbols(node.meta["val"] for node in inputs)
    bounds = symbols.ranges
    if independent in bounds and bounds[independent][0] == 2:
        bounds[independent] = (1, bounds[independent][1])
    conditions = [Size(guard) for guard in symbols.guards if not guard.is_Boolean or guard.free_symbols]

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
