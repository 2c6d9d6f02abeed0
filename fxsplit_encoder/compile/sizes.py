"""Evaluates sizes of a traced graph, and the guards of its trace, which Dynamo checks on its own path only.

A traced size is an int or a sympy expression, printed as Python once, so that evaluating it needs no sympy.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.symbols import Symbols, expression_of, python_source
from fxsplit_encoder.errors import CompileError

SymbolValues = dict[str, int]


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """Returns the sympy expression of a size."""
    expr = expression_of(size)
    assert isinstance(expr, sympy.Expr)
    return expr


@dataclass(eq=False)
class Size:
    """A size (or another scalar) of the graph, evaluated for symbol values."""

    shown: str
    source: str
    """In Python."""
    symbols: tuple[str, ...]

    def __post_init__(self) -> None:
        function = f"lambda {', '.join(self.symbols)}: {self.source}"
        self._function: Callable[..., Any] = eval(function, {"math": math, "torch": torch})
        self._constant = int(self.source) if self.source.isdigit() else None

    @classmethod
    def of(cls, value: sympy.Basic | int | torch.SymInt | torch.SymFloat | torch.SymBool) -> Size:
        """Returns the size of a traced number or of its expression."""
        expr = expression_of(value)
        return cls(str(expr), python_source(expr), tuple(sorted(str(s) for s in expr.free_symbols)))

    def __call__(self, values: Mapping[str, int]) -> int:
        """Returns the size for these symbol values."""
        if self._constant is not None:
            return self._constant
        try:
            result: int = self._function(*map(values.__getitem__, self.symbols))
        except KeyError as error:
            raise CompileError(
                f"size {self.shown} depends on {error.args[0]}, which no input of the graph determines"
            ) from error
        return result

    def __repr__(self) -> str:
        return self.shown


def symbol_of(size: int | torch.SymInt) -> str | None:
    """Returns the name of the symbol in a size, None for a constant; raises CompileError for several."""
    symbols = expression(size).free_symbols
    if len(symbols) > 1:
        raise CompileError(f"the token count is {size}, an expression of several symbols; expected one")
    return str(next(iter(symbols))) if symbols else None


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Returns sizes, strides, dtype and device of a traced tensor, comparable with those of others."""
    sizes = tuple(expression(s) for s in tensor.shape)
    strides = tuple(expression(s) for s in tensor.stride())
    return (sizes, strides, tensor.dtype, tensor.device)


def shape_exprs(tensor: Tensor) -> tuple[sympy.Expr, ...]:
    """Returns the sizes of a traced tensor as expressions."""
    return tuple(expression(size) for size in tensor.shape)


def symbol_sources(inputs: Sequence[fx.Node]) -> list[tuple[str, int, int]]:
    """Returns (symbol, input, dimension) for each symbol but those that depend on data; numbers first."""
    values = [node.meta["val"] for node in inputs]
    found = [(expression(v), i, -1) for i, v in enumerate(values) if isinstance(v, torch.SymInt)]
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            found += [(size, index, dim) for dim, size in enumerate(shape_exprs(value))]
    sources: dict[str, tuple[int, int]] = {}
    for size, index, dim in found:
        if size.is_Symbol:
            sources.setdefault(str(size), (index, dim))
    return [(symbol, index, dim) for symbol, (index, dim) in sources.items()]


def assumptions_of(inputs: Sequence[fx.Node]) -> list[sympy.Basic]:
    """Returns a trace's assumptions on its symbols, from the inputs of the traced graph."""
    return Symbols(node.meta["val"] for node in inputs).assumptions


_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Call, ast.Attribute, ast.IfExp),
)
_OF_TORCH = frozenset(f"torch.sym_{name}" for name in ("float", "int", "max", "min", "not", "sum"))
_FUNCTIONS = frozenset(("abs", "bool", "float", "int", "max", "min", "pow", "round"))


def check_arithmetic(source: str, symbols: Sequence[str]) -> None:
    """Raises ValueError unless a source is an expression of numbers, symbols, and functions of `math`."""
    if not all(symbol.isidentifier() for symbol in symbols):
        raise ValueError(f"symbols: expected names; got {list(symbols)}")
    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"size: expected arithmetic; got {source!r}") from error
    for node in ast.walk(tree):
        known = isinstance(node, _ARITHMETIC)
        if isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            known = (module == "math" and node.attr[0] != "_") or f"{module}.{node.attr}" in _OF_TORCH
        elif isinstance(node, ast.Name):
            known = node.id in symbols or node.id in (*_FUNCTIONS, "math", "torch")
        elif isinstance(node, ast.Constant):
            known = isinstance(node.value, int | float)
        if not known:
            raise ValueError(
                f"size: expected arithmetic of {', '.join(symbols) or 'numbers'}; got {source!r}"
            )


@dataclass(frozen=True)
class Guards:
    """Bounds and conditions of a trace."""

    bounds: Mapping[str, tuple[float, float]]
    conditions: tuple[Size, ...]

    def __call__(self, values: SymbolValues) -> bool:
        """Whether the trace holds, by the guards on these symbols."""
        bounds = ((value, *self.bounds[symbol]) for symbol, value in values.items() if symbol in self.bounds)
        within = all(low <= value <= high for value, low, high in bounds)
        known = (condition for condition in self.conditions if set(condition.symbols) <= values.keys())
        try:
            return within and all(bool(condition(values)) for condition in known)
        except ZeroDivisionError:  # s % (s // 4) == 0, of fewer than four
            return False


def _number(bound: sympy.Basic) -> float:
    return int(bound) if bound.is_Integer else math.copysign(math.inf, 1 if bool(bound > 0) else -1)


def guards_of(inputs: Sequence[fx.Node], independent: str | None = None) -> Guards:
    """Returns the guards of a trace, from the inputs of the traced graph. Dynamo lets symbols begin at 2; the
    one that counts independent rows may be 1, since a run of one row is the first row of a run of two.
    """
    symbols = Symbols(node.meta["val"] for node in inputs)
    bounds = {symbol: (_number(low), _number(high)) for symbol, (low, high) in symbols.ranges.items()}
    if independent in bounds and bounds[independent][0] == 2:
        bounds[independent] = (1, bounds[independent][1])
    conditions = (Size.of(guard) for guard in symbols.guards if not guard.is_Boolean or guard.free_symbols)
    return Guards(bounds, tuple(conditions))
