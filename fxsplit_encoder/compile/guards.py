"""The guards of a trace on its symbols: Dynamo checks them on its own path, which ours bypasses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxsplit_encoder.compile.sizes import Size, SymbolValues

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx


def guards_of(inputs: Sequence[fx.Node], independent: str | None = None) -> Callable[[SymbolValues], bool]:
    """Whether a trace holds for given values of symbols, as a function of them.

    Dynamo lets symbols begin at 2. One that counts independent rows may be 1: a run of one row is the first
    row of a run of two.

    Args:
        inputs: the inputs of the traced graph.
        independent: the symbol that counts independent rows, if any.
    """
    shape_env = next(
        (n.meta["val"].fake_mode.shape_env for n in inputs if hasattr(n.meta["val"], "fake_mode")), None
    )
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
        return within and all(bool(c(values)) for c in conditions if set(c.symbols) <= values.keys())

    return accepts
