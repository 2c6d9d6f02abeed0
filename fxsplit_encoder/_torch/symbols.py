"""Symbolic sizes: their sympy expressions, and what a trace knows of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod
from torch.utils._sympy.printers import PythonPrinter

from fxsplit_encoder._torch.aot import fake_mode_of

__all__ = ["FloorDiv", "Mod", "PythonMod"]


def expression_of(value: Any) -> sympy.Basic:
    """Returns the expression of a traced or plain number."""
    found: sympy.Basic = value.node.expr if hasattr(value, "node") else sympy.sympify(value)
    return found


def under_own_name(value: Any) -> Any:
    """Returns a traced number by the name of all equal sizes, where Inductor would take an earlier one."""
    if not isinstance(value, torch.SymInt) or value.node._expr == value.node.expr:
        return value
    node = value.node
    return node.shape_env.create_symintnode(node.expr, hint=node.hint if node.has_hint() else None)


def has_hint(value: torch.SymInt) -> bool:
    """Whether a traced number had a value while tracing (backed) or not (unbacked)."""
    return bool(value.node.has_hint())


def python_source(expression: sympy.Basic) -> str:
    """Returns an expression of sizes as Python, with torch's functions, which sympy's printer lacks."""
    source: str = PythonPrinter().doprint(expression)
    return source


class Symbols:
    """Ranges and guards of a trace's symbols, found by its inputs; empty if none is a traced tensor."""

    def __init__(self, values: Iterable[Any]) -> None:
        fake_mode = fake_mode_of(values)
        self._shape_env: Any = None if fake_mode is None else fake_mode.shape_env

    @property
    def guards(self) -> list[sympy.Basic]:
        """Conditions under which the trace holds."""
        return [] if self._shape_env is None else [guard.expr for guard in self._shape_env.guards]

    @property
    def assumptions(self) -> list[sympy.Basic]:
        """The same conditions in the symbols that the graph uses: one of those known to be equal."""
        return [self._shape_env.replace(guard) for guard in self.guards]

    @property
    def ranges(self) -> dict[str, tuple[sympy.Basic, sympy.Basic]]:
        """Least and greatest value per symbol."""
        if self._shape_env is None:
            return {}
        found = self._shape_env.var_to_range.items()
        return {str(symbol): (bounds.lower, bounds.upper) for symbol, bounds in found}
