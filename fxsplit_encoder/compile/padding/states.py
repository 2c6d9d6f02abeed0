"""The states of values and sizes in the padding analysis, and a node as its rules see it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fxsplit_encoder._torch.dispatch import OpOverload, has_tag
from fxsplit_encoder._torch.symbols import FloorDiv, Mod, PythonMod, expression_of
from fxsplit_encoder.compile.rewriting import arguments_of, node_value
from fxsplit_encoder.compile.sizes import shape_exprs

# The token count is a multiple of the divisor that the trace's guards ask for: `divisor * _GROUPS`.
_GROUPS = sympy.Symbol("groups", integer=True, positive=True)


class Mixed(Exception):
    """Real entries may depend on pad rows, and why: a state, which rules raise."""


def symbols_of(expr: sympy.Expr) -> set[str]:
    """Returns the names of the symbols in a size."""
    return {str(s) for s in expr.free_symbols}


class TokenSizes:
    """How sizes of a traced graph follow the token count.

    The token count is written as a multiple of its divisor by the trace's guards, which turns `s // 4` into a
    polynomial where `s % 4 == 0` is guarded. Other sizes (`s // 5000 + 1`, `max(s, 7)`) are undecided.
    """

    def __init__(
        self, token_symbol: str, segment_symbols: Iterable[str] = (), guards: Iterable[sympy.Basic] = ()
    ) -> None:
        self.token_symbol = token_symbol
        self.segment_symbols = frozenset(segment_symbols) - {token_symbol}
        guards = [g for g in guards if token_symbol in symbols_of(g)]
        self.divisor = math.lcm(*(_divisor_asked_by(guard) for guard in guards))
        # The sizes of a tower's nodes are few, and each is asked about at hundreds of them.
        self._normal_form = functools.cache(self._expanded)
        self.varies = functools.cache(self._varies)
        self.counts_rows = functools.cache(self._counts_rows)
        equations = (guard for guard in guards if isinstance(guard, sympy.Eq))
        self.unmet = [each for each in equations if self._normal_form(each.lhs - each.rhs) != 0]
        """Equations that hold for some token counts only."""

    def mentions_padding(self, expr: sympy.Basic) -> bool:
        """Whether a size contains a symbol that padding changes."""
        symbols = symbols_of(expr)
        return self.token_symbol in symbols or not self.segment_symbols.isdisjoint(symbols)

    def _varies(self, expr: sympy.Basic) -> bool:
        """Whether padding changes a size (not `s // (s // 4)`); raises Mixed if undecided."""
        if not self.mentions_padding(expr):
            return False
        if not isinstance(expr, sympy.Expr):
            raise Mixed(f"{expr} depends on the token count")
        normal = self._normal_form(expr)
        if normal.has(_GROUPS) and not normal.is_polynomial(_GROUPS):
            raise Mixed(f"the size {expr} follows the token count in no way that is known")
        return self.mentions_padding(normal) or bool(normal.has(_GROUPS))

    def _counts_rows(self, expr: sympy.Expr) -> bool:
        """Whether more tokens append entries: the size grows with them and depends on no number of segments;
        raises Mixed if undecided.
        """
        if not self.varies(expr) or not self.segment_symbols.isdisjoint(symbols_of(expr)):
            return False
        coefficients = sympy.Poly(self._normal_form(expr), _GROUPS).all_coeffs()
        return all(c.is_nonnegative for c in coefficients[:-1])

    def are_equal(self, one: sympy.Expr, other: sympy.Expr) -> bool:
        """Whether two sizes are the same at every token count; undecided is no."""
        return bool(one == other or sympy.expand(self._normal_form(one) - self._normal_form(other)) == 0)

    def count_tokens(self, size: sympy.Expr) -> bool:
        """Whether a size equals the token count, however it is written."""
        tokens = [symbol for symbol in size.free_symbols if str(symbol) == self.token_symbol]
        return bool(tokens) and self.are_equal(size, tokens[0])

    def quotient(self, size: sympy.Expr, divisor: sympy.Expr | int) -> sympy.Expr | None:
        """Returns `size / divisor` where it is an integer at every token count, else None."""
        normal = self._normal_form(sympy.sympify(divisor))
        if normal == 0:
            return None
        result = sympy.cancel(self._normal_form(size) / normal)
        return result if sympy.fraction(result)[1] == 1 else None

    def _expanded(self, expr: sympy.Expr) -> sympy.Expr:
        tokens = [s for s in expr.free_symbols if str(s) == self.token_symbol]
        return sympy.expand(expr.xreplace(dict.fromkeys(tokens, self.divisor * _GROUPS)))


def _divisor_asked_by(guard: sympy.Basic) -> int:
    """A divisor of the token count where `Eq(c * s % m, 0)` or `Eq(m * (s // m), s)` holds; 1 for others."""
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


@dataclass(frozen=True, slots=True)
class Rows:
    """The first entries along `dim` are those of the unpadded run, see `compile.padding`."""

    dim: int
    blocks: sympy.Expr | int = 1
    """Number of equal blocks of the dimension, the first entries of each of which are meant."""

    def at(self, dim: int) -> Rows:
        """Returns the same rows along another dimension."""
        return Rows(dim, self.blocks)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


SHARED = _Named("shared")
SEGMENTS = _Named("segments")
State = Any
"""Rows, Mixed, SHARED, SEGMENTS, or a list of them for an operation with several results."""


def token_dim(value: torch.Tensor, token_symbol: str) -> int | None:
    """Returns the first dimension whose size depends on the token symbol."""
    return next(
        (dim for dim, expr in enumerate(shape_exprs(value)) if token_symbol in symbols_of(expr)), None
    )


class NodeView:
    """A node for its rule: arguments by position, states, shapes."""

    def __init__(
        self, node: fx.Node, states: Mapping[fx.Node, State], seeds: Collection[fx.Node], sizes: TokenSizes
    ) -> None:
        self.node = node
        self.states = states
        self.seeds = seeds
        self.sizes = sizes
        self.args = tuple(arguments_of(node).values())
        self.name = operation(node)

    def arg(self, position: int, default: Any = None) -> Any:
        """Returns an argument by position; `default` where it is None or left out."""
        value = self.args[position] if position < len(self.args) else None
        return default if value is None else value

    def state(self, argument: Any) -> State:
        """Returns the state of an argument; constants are shared."""
        return self.states.get(argument, SHARED) if isinstance(argument, fx.Node) else SHARED

    def rows_of(self, position: int = 0) -> Rows:
        """Returns the rows of an argument, which must have some; perhaps in several blocks."""
        state = self.state(self.arg(position))
        if not isinstance(state, Rows):
            raise Mixed(f"{self.name} takes rows where none were expected (argument {position})")
        return state

    def rows(self, position: int = 0) -> int:
        """Returns the token dimension of an argument, which must have one, in one block."""
        rows = self.rows_of(position)
        if rows.blocks != 1:
            raise Mixed(f"{self.name} takes tokens that are joined with an outer dimension")
        return rows.dim

    def rank(self, position: int = 0) -> int:
        """Dimensions of a tensor argument."""
        return self.tensor(position).dim()

    def tensor(self, position: int = 0) -> torch.Tensor:
        """Returns the traced value of a tensor argument."""
        value = self.arg(position).meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    def dim(self, value: Any) -> int:
        """Returns a dimension of the first argument, counted from the front."""
        return int(value) % self.rank()

    def dims(self, values: Any) -> set[int]:
        """Returns dimensions of the first argument: one, or several."""
        return {self.dim(d) for d in ([values] if isinstance(values, int) else values)}

    def output(self) -> torch.Tensor:
        """Returns the traced result, the first of several."""
        value = self.node.meta["val"]
        tensor = value[0] if isinstance(value, list | tuple) else value
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def each_result(self, state: State) -> State:
        """Returns the state of a node all of whose results have this one."""
        value = self.node.meta["val"]
        return [state] * len(value) if isinstance(value, list | tuple) else state

    def varying_dim(self) -> int | None:
        """Returns the first dimension of the result whose size padding changes."""
        sizes = enumerate(shape_exprs(self.output()))
        return next((dim for dim, size in sizes if self.sizes.varies(size)), None)

    def require_shared(self, *positions: int) -> None:
        """Raises Mixed if one of these arguments depends on the tokens."""
        for position in positions:
            argument = self.arg(position)
            if argument is not None and self.state(argument) is not SHARED:
                raise Mixed(f"argument {position} of {self.name} depends on the tokens")

    def fail(self, why: str) -> Mixed:
        """Returns an error that names this operation."""
        return Mixed(f"{self.name} {why}")


Rule = Callable[[NodeView], State]
"""The state of a node's result, given those of its arguments; raises Mixed where rows are mixed."""

_OUR_ATTENTIONS = ("varlen_attention", "dense_attention")


def operation(node: fx.Node) -> str:
    """Returns the name of an ATen operation, qualified for other libraries', by which rules are found."""
    target = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", str(target))
    name: str = target.overloadpacket.__name__
    known = target.namespace == "aten" or (target.namespace == "fxsplit" and name in _OUR_ATTENTIONS)
    return name if known else f"{target.namespace}::{name}"


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node takes from a random generator."""
    return has_tag(node.target, torch.Tag.nondeterministic_seeded)


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch tags a node's operation as pointwise."""
    return has_tag(node.target, torch.Tag.pointwise)


def scalar_arguments(node: fx.Node) -> list[sympy.Expr]:
    """Returns the numbers that a node takes from other nodes, as expressions."""
    values = (node_value(n) for n in node.all_input_nodes)
    kinds = torch.SymInt | torch.SymFloat | torch.SymBool
    return [expression_of(value) for value in values if isinstance(value, kinds)]


def reads_token_count(node: fx.Node, sizes: TokenSizes) -> bool:
    """Whether a scalar argument depends on a size that padding changes."""
    return any(map(sizes.varies, scalar_arguments(node)))
