"""Sizes as polynomials of the token count: what padding changes, decided by algebra or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterable

import sympy

from fxsplit_encoder._torch.symbols import FloorDiv, Mod, PythonMod

# The token count is a multiple of the divisor that the trace's guards ask for: `divisor * _GROUPS`.
_GROUPS = sympy.Symbol("groups", integer=True, positive=True)


class NotProvedError(Exception):
    """Raised by a rule that cannot tell whether rows stay apart; the pass turns it into `Mixed`."""


def symbols_of(expr: sympy.Expr) -> set[str]:
    """The names of the symbols in a size."""
    return {str(s) for s in expr.free_symbols}


class TokenSizes:
    """How sizes of a traced graph follow the token count.

    A size is brought into a normal form: the token count is written as a multiple of what the guards of the
    trace say divides it, which turns `s // 4` into a polynomial where `s % 4 == 0` is guarded. A size that is
    no polynomial then (`s // 5000 + 1`, `max(s, 7)`) is undecided: no number of examples tells what it does
    at the next one.

    Args:
        token_symbol: the name of the symbol that counts tokens.
        segment_symbols: the names of those that count segments.
        guards: what the trace assumes of its symbols.
    """

    def __init__(
        self, token_symbol: str, segment_symbols: Iterable[str] = (), guards: Iterable[sympy.Basic] = ()
    ) -> None:
        self.token_symbol = token_symbol
        self.segment_symbols = frozenset(segment_symbols) - {token_symbol}
        guards = [g for g in guards if token_symbol in symbols_of(g)]
        self.divisor = math.lcm(*(_divisor_asked_by(guard) for guard in guards))
        self.unmet = [g for g in guards if isinstance(g, sympy.Eq) and not self._always_holds(g)]
        """Equations that hold for some token counts only: the trace is one of these counts'."""
        # The sizes of a tower's nodes are few, and each is asked about at hundreds of them.
        self._normal: dict[sympy.Expr, sympy.Expr] = {}
        self._varies: dict[sympy.Basic, bool] = {}
        self._counts_rows: dict[sympy.Expr, bool] = {}

    def mentions_padding(self, expr: sympy.Basic) -> bool:
        """Whether a size is written with a symbol whose value padding changes."""
        symbols = symbols_of(expr)
        return self.token_symbol in symbols or not self.segment_symbols.isdisjoint(symbols)

    def varies(self, expr: sympy.Expr) -> bool:
        """Whether padding changes a size. `s // (s // 4)` is written with the token count and does not.

        Raises:
            NotProvedError: it is undecided.
        """
        if (known := self._varies.get(expr)) is None:
            known = self._varies[expr] = self._does_vary(expr)
        return known

    def _does_vary(self, expr: sympy.Basic) -> bool:
        if not self.mentions_padding(expr):
            return False
        if not isinstance(expr, sympy.Expr):
            raise NotProvedError(f"{expr} depends on the token count")
        normal = self._normal_form(expr)
        if normal.has(_GROUPS) and not normal.is_polynomial(_GROUPS):
            raise NotProvedError(f"the size {expr} follows the token count in no way that is known")
        return self.mentions_padding(normal) or bool(normal.has(_GROUPS))

    def counts_rows(self, expr: sympy.Expr) -> bool:
        """Whether a size grows with the token count and depends on no number of segments, so that more tokens
        append entries.

        Raises:
            NotProvedError: it is undecided.
        """
        if (known := self._counts_rows.get(expr)) is None:
            known = self._counts_rows[expr] = self._does_count_rows(expr)
        return known

    def _does_count_rows(self, expr: sympy.Expr) -> bool:
        if not self.varies(expr) or not self.segment_symbols.isdisjoint(symbols_of(expr)):
            return False
        coefficients = sympy.Poly(self._normal_form(expr), _GROUPS).all_coeffs()
        return all(c.is_nonnegative for c in coefficients[:-1])

    def are_equal(self, one: sympy.Expr, other: sympy.Expr) -> bool:
        """Whether two sizes are the same at every token count that the trace holds for; undecided is no."""
        return bool(one == other or sympy.expand(self._normal_form(one) - self._normal_form(other)) == 0)

    def count_tokens(self, size: sympy.Expr) -> bool:
        """Whether a size is the token count, however it is written."""
        tokens = [symbol for symbol in size.free_symbols if str(symbol) == self.token_symbol]
        return bool(tokens) and self.are_equal(size, tokens[0])

    def quotient(self, size: sympy.Expr, divisor: sympy.Expr | int) -> sympy.Expr | None:
        """`size / divisor` where that is an integer at every token count; None where not, or undecided."""
        normal = self._normal_form(sympy.sympify(divisor))
        if normal == 0:
            return None
        result = sympy.cancel(self._normal_form(size) / normal)
        return result if sympy.fraction(result)[1] == 1 else None

    def _normal_form(self, expr: sympy.Expr) -> sympy.Expr:
        if expr not in self._normal:
            self._normal[expr] = sympy.expand(self._with_divisor(expr))
        return self._normal[expr]

    def _with_divisor(self, expr: sympy.Basic) -> sympy.Basic:
        tokens = [s for s in expr.free_symbols if str(s) == self.token_symbol]
        return expr.xreplace(dict.fromkeys(tokens, self.divisor * _GROUPS))

    def _always_holds(self, guard: sympy.Eq) -> bool:
        difference = self._with_divisor(guard.lhs - guard.rhs)
        return bool(sympy.expand(difference) == 0)


def _divisor_asked_by(guard: sympy.Basic) -> int:
    """What divides the token count where a guard holds, of the forms `Eq(c * s % m, 0)` and
    `Eq(m * (s // m), s)`; 1 for any other.
    """
    if not isinstance(guard, sympy.Eq):
        return 1
    for side, other in ((guard.lhs, guard.rhs), (guard.rhs, guard.lhs)):
        if isinstance(side, Mod | PythonMod) and other == 0:
            return _divisor_of_remainder(*side.args)
        factor, rest = side.as_coeff_Mul()
        if isinstance(rest, FloorDiv) and rest.args == (other, factor) and other.is_Symbol:
            return int(factor)
    return 1


def _divisor_of_remainder(dividend: sympy.Expr, modulus: sympy.Expr) -> int:
    factor, rest = dividend.as_coeff_Mul()
    if not (rest.is_Symbol and factor.is_Integer and modulus.is_Integer):
        return 1
    return int(modulus) // math.gcd(int(factor), int(modulus))
