"""Sizes as polynomials of the token count."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Mod, PythonMod

from fxsplit_encoder.compile.padding.states import Mixed, TokenSizes

S = sympy.Symbol("s0", integer=True, positive=True)
T = sympy.Symbol("s1", integer=True, positive=True)
SEGMENTS = sympy.Symbol("s2", integer=True, positive=True)
BY_4 = sympy.Eq(Mod(S, 4), 0)


def sizes(*guards: sympy.Basic) -> TokenSizes:
    return TokenSizes("s0", {"s2"}, guards)


@pytest.mark.parametrize(
    ("guard", "divisor"),
    [
        (BY_4, 4),
        (sympy.Eq(PythonMod(S, 4), 0), 4),
        (sympy.Eq(Mod(6 * S, 4), 0), 2),
        (sympy.Eq(4 * FloorDiv(S, 4), S), 4),
        (sympy.Eq(Mod(S, T), 0), 1),
        (sympy.Ne(Mod(S, 4), 0), 1),
        (sympy.Eq(Mod(T, 4), 0), 1),
    ],
)
def test_a_guard_may_say_what_divides_the_token_count(guard: sympy.Basic, divisor: int) -> None:
    assert sizes(guard).divisor == divisor


def test_divisors_are_combined() -> None:
    assert sizes(BY_4, sympy.Eq(Mod(S, 6), 0)).divisor == 12


def test_a_guard_of_single_counts_is_unmet() -> None:
    assert sizes(BY_4, sympy.Ne(S, 8), S < 100).unmet == []
    assert sizes(sympy.Eq(S, 12)).unmet == [sympy.Eq(S, 12)]
    odd = sympy.Eq(Mod(S, 4), 1)
    assert sizes(odd).unmet == [odd]


@pytest.mark.parametrize(
    ("size", "varies", "counts_rows"),
    [
        (sympy.Integer(7), False, False),
        (FloorDiv(T, 5000), False, False),
        (FloorDiv(S, FloorDiv(S, 4)), False, False),
        (4 * FloorDiv(S, 4) - S, False, False),
        (Mod(S, 2), False, False),
        (S, True, True),
        (2 * S - 1, True, True),
        (S * T, True, True),
        (S**2, True, True),
        (FloorDiv(S, 4), True, True),
        (FloorDiv(S + 3, 4), True, True),
        (S**2 - S, True, False),
        (100 - S, True, False),
        (SEGMENTS - 1, True, False),
        (S * SEGMENTS, True, False),
    ],
)
def test_whether_padding_changes_a_size_and_appends_rows(
    size: sympy.Expr, varies: bool, counts_rows: bool
) -> None:
    """Rows are counted by what grows with the tokens alone."""
    assert (sizes(BY_4).varies(size), sizes(BY_4).counts_rows(size)) == (varies, counts_rows)


@pytest.mark.parametrize(
    "size", [FloorDiv(S, 5000) + 1, FloorDiv(S, 8), Mod(S, 3), Max(7, S), FloorDiv(100, S)]
)
def test_a_size_that_is_no_polynomial_is_undecided(size: sympy.Expr) -> None:
    with pytest.raises(Mixed, match="in no way that is known"):
        sizes(BY_4).varies(size)


def test_a_quotient_is_an_integer_at_every_count() -> None:
    known = sizes(BY_4)
    assert known.quotient(6 * T, 3) == 2 * T
    assert known.quotient(T**2, T) == T
    assert known.quotient(S, 4) is not None
    assert known.quotient(S, 8) is None
    assert known.quotient(sympy.Integer(2), sympy.Integer(4)) is None
    assert known.quotient(FloorDiv(S, 5000), 2) is None
    assert known.quotient(sympy.Integer(0), 0) is None


@pytest.mark.parametrize(
    ("guards", "size", "expected"),
    [
        ((), S, True),
        ((BY_4,), FloorDiv(S, 4) * FloorDiv(S, FloorDiv(S, 4)), True),
        ((BY_4,), 4 * FloorDiv(S, 4), True),
        ((), 4 * FloorDiv(S, 4), False),
        ((BY_4,), 2 * FloorDiv(S, 4), False),
        ((), T, False),
        ((), sympy.Integer(4), False),
    ],
)
def test_the_token_count_is_recognized_however_it_is_written(
    guards: tuple[sympy.Basic, ...], size: sympy.Expr, expected: bool
) -> None:
    assert sizes(*guards).count_tokens(size) == expected
