"""Sizes of a traced graph as functions of its symbols.

A traced size is an int or a sympy expression (`s33`, `s33 // 4`). `Size` evaluates it for given symbol values
without
sympy: the expression is printed as Python once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor

from fxsplit_encoder._torch.symbols import expression_of, python_source
from fxsplit_encoder.errors import CompileError

SymbolValues = dict[str, int]


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """The sympy expression of a size."""
    expr = expression_of(size)
    assert isinstance(expr, sympy.Expr)
    return expr


class Size:
    """A size (or another scalar) of the graph, evaluated for symbol values."""

    def __init__(self, expr: sympy.Expr) -> None:
        self.expr = expr
        self.symbols = tuple(sorted(str(s) for s in expr.free_symbols))
        self._constant = int(expr) if not self.symbols and expr.is_Integer else None
        source = f"lambda {', '.join(self.symbols)}: {python_source(expr)}"
        self._function: Callable[..., Any] = eval(source, {"math": math, "torch": torch})

    @classmethod
    def of(cls, value: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> Size:
        """The size behind a traced number."""
        return cls(expression_of(value))

    def __call__(self, values: Mapping[str, int]) -> int:
        """The size where the symbols have these values."""
        if self._constant is not None:
            return self._constant
        try:
            result = self._function(*(values[s] for s in self.symbols))
        except KeyError as error:
            raise CompileError(
                f"size {self.expr} depends on {error.args[0]}, which no input of the graph determines"
            ) from error
        return result  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return str(self.expr)


def symbol_of(size: int | torch.SymInt) -> str | None:
    """The name of the one symbol in a size, or None for a constant; an error when it mixes several."""
    symbols = expression(size).free_symbols
    if len(symbols) > 1:
        raise CompileError(f"the token count is {size}, an expression of several symbols; expected one")
    return str(next(iter(symbols))) if symbols else None


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Sizes, strides, dtype and device of a traced tensor, comparable with those of others."""
    sizes = tuple(expression(s) for s in tensor.shape)
    strides = tuple(expression(s) for s in tensor.stride())
    return (sizes, strides, tensor.dtype, tensor.device)


def shape_exprs(tensor: Tensor) -> tuple[sympy.Expr, ...]:
    """The sizes of a traced tensor."""
    return tuple(expression(size) for size in tensor.shape)
