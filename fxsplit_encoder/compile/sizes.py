"""Evaluates sizes of a traced graph, and the guards of its trace, which Dynamo checks on its own path only.

A traced size is an int or a sympy expression, printed as Python once, so that evaluating it needs no sympy.
"""

from __future__ import annotations

import functools
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

    def __reduce__(self) -> Any:
        return Size, (self.shown, self.source, self.symbols)


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


def all_hold(conditions: Sequence[Size], values: SymbolValues) -> bool:
    """Whether those conditions hold whose symbols have values."""
    known = (condition for condition in conditions if set(condition.symbols) <= values.keys())
    try:
        return all(bool(condition(values)) for condition in known)
    except ZeroDivisionError:  # s % (s // 4) == 0, of fewer than four
        return False


def guards_of(inputs: Sequence[fx.Node], independent: str | None = None) -> Callable[[SymbolValues], bool]:
    """Returns the guards of a trace, from the inputs of the traced graph. Dynamo lets symbols begin at 2; the
    one that counts independent rows may be 1, since a run of one row is the first row of a run of two.
    """
    symbols = Symbols(node.meta["val"] for node in inputs)
    conditions: list[Size] = []
    for symbol, (low, high) in symbols.ranges.items():
        least = sympy.S.One if symbol == independent and low == 2 else low
        bounds = (f"{symbol} {sign} {end}" for sign, end in ((">=", least), ("<=", high)) if end.is_Integer)
        conditions += [Size(bound, bound, (symbol,)) for bound in bounds]
    guards = (guard for guard in symbols.guards if not guard.is_Boolean or guard.free_symbols)
    return functools.partial(all_hold, (*conditions, *map(Size.of, guards)))
