"""What the analysis knows of a value, a node as its rules see it, and which rule an operation has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from fxsplit_encoder._torch.dispatch import OpOverload, has_tag, schema_of
from fxsplit_encoder.compile.padding.token_sizes import (
    NotProvedError,
    TokenSizes,
    symbols_of,
)
from fxsplit_encoder.compile.sizes import shape_exprs


@dataclass(frozen=True, slots=True)
class Rows:
    """The first entries along `dim` are those of the unpadded run, see `compile.padding.analysis`."""

    dim: int
    blocks: sympy.Expr | int = 1
    """Into how many equal blocks the dimension falls, the first entries of each of which are meant: tokens
    that were made the inner of two dimensions, and joined with the outer one."""

    def at(self, dim: int) -> Rows:
        """The same rows along another dimension."""
        return Rows(dim, self.blocks)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Real entries may depend on pad rows, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


SHARED = _Named("shared")
SEGMENTS = _Named("segments")
State = Any
"""Rows, Mixed, SHARED, SEGMENTS, or a list of them for an operation with several results."""


def token_dim(value: torch.Tensor, token_symbol: str) -> int | None:
    """The first dimension whose size depends on the token symbol."""
    return next(
        (dim for dim, expr in enumerate(shape_exprs(value)) if token_symbol in symbols_of(expr)), None
    )


class Facts(Protocol):
    """What a rule may ask of the whole analysis."""

    states: dict[fx.Node, State]
    seeds: frozenset[fx.Node]
    sizes: TokenSizes

    def reads_token_count(self, node: fx.Node) -> bool:
        """Whether a scalar argument depends on a size that padding changes."""

    def looks_up_safely(self, node: fx.Node) -> bool:
        """Whether the indices of pad rows are in range."""


class NodeView:
    """A node as the rules see it: arguments by position, states, shapes."""

    def __init__(self, analysis: Facts, node: fx.Node) -> None:
        self.analysis = analysis
        self.node = node
        self.args = positional(node)
        self.name = operation(node)

    def arg(self, position: int, default: Any = None) -> Any:
        """An argument by position; `default` where it is None or left out."""
        value = self.args[position] if position < len(self.args) else None
        return default if value is None else value

    def state(self, argument: Any) -> State:
        """The state of an argument; constants are shared."""
        return self.analysis.states.get(argument, SHARED) if isinstance(argument, fx.Node) else SHARED

    def rows_of(self, position: int = 0) -> Rows:
        """The rows of an argument, which must have some; perhaps in several blocks."""
        state = self.state(self.arg(position))
        if not isinstance(state, Rows):
            raise NotProvedError(f"{self.name} takes rows where none were expected (argument {position})")
        return state

    def rows(self, position: int = 0) -> int:
        """The token dimension of an argument, which must have one, in one block."""
        rows = self.rows_of(position)
        if rows.blocks != 1:
            raise NotProvedError(f"{self.name} takes tokens that are joined with an outer dimension")
        return rows.dim

    def rank(self, position: int = 0) -> int:
        """Dimensions of a tensor argument."""
        return self.tensor(position).dim()

    def tensor(self, position: int = 0) -> torch.Tensor:
        """The traced value of a tensor argument."""
        value = self.arg(position).meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    def dim(self, value: Any, position: int = 0) -> int:
        """A dimension of a tensor argument, counted from the front."""
        return int(value) % self.rank(position)

    def output(self) -> torch.Tensor:
        """The traced result, the first of several."""
        value = self.node.meta["val"]
        tensor = value[0] if isinstance(value, list | tuple) else value
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def each_result(self, state: State) -> State:
        """The state of a node all of whose results, one or several, have this one."""
        value = self.node.meta["val"]
        return [state] * len(value) if isinstance(value, list | tuple) else state

    def varying_dim(self) -> int | None:
        """The first dimension of the result whose size padding changes."""
        sizes = enumerate(shape_exprs(self.output()))
        return next((dim for dim, size in sizes if self.analysis.sizes.varies(size)), None)

    def require_shared(self, *positions: int) -> None:
        """Raises NotProvedError if one of these arguments depends on the tokens."""
        for position in positions:
            argument = self.arg(position)
            if argument is not None and self.state(argument) is not SHARED:
                raise NotProvedError(f"argument {position} of {self.name} depends on the tokens")

    def require_safe_lookup(self) -> None:
        """Raises NotProvedError if pad rows could look up something out of range."""
        if not self.analysis.looks_up_safely(self.node):
            raise self.fail("looks up computed indices, which may be out of range in pad rows")

    def fail(self, why: str) -> NotProvedError:
        """The error that says why this operation is not known to keep rows apart."""
        return NotProvedError(f"{self.name} {why}")


Rule = Callable[[NodeView], State]
"""The state of a node's result, given those of its arguments; raises NotProvedError where rows are mixed."""

RULES: dict[str, Rule] = {}
"""The rule of each operation that has one of its own, by the names of `operation`."""


def rule(*operations: str) -> Callable[[Rule], Rule]:
    """Makes a function the rule of these operations, each of which has one rule."""

    def register(function: Rule) -> Rule:
        for operation in operations:
            assert operation not in RULES, operation
            RULES[operation] = function
        return function

    return register


_OUR_ATTENTIONS = ("varlen_attention", "dense_attention")


def operation(node: fx.Node) -> str:
    """The name that rules go by: that of the ATen operation, qualified for operations of other libraries."""
    target = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", str(target))
    name: str = target.overloadpacket.__name__
    known = target.namespace == "aten" or (target.namespace == "fxsplit" and name in _OUR_ATTENTIONS)
    return name if known else f"{target.namespace}::{name}"


def positional(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments by position, those given by name or left at their default included."""
    args = list(node.args)
    if isinstance(node.target, OpOverload):
        for parameter in schema_of(node.target).arguments[len(args) :]:
            if parameter.kwarg_only:
                break
            args.append(node.kwargs.get(parameter.name, parameter.default_value))
    return tuple(args)


def named(node: fx.Node, name: str) -> Any:
    """The argument of a schema's parameter; None if there is none."""
    for parameter, value in zip(schema_of(node.target).arguments, positional(node), strict=False):
        if parameter.name == name:
            return value
    return node.kwargs.get(name)


def indices_of(node: fx.Node) -> Sequence[Any]:
    """The indices of a lookup: all its arguments after the first, or for an embedding, too."""
    return [i for a in node.args[1:] for i in (a if isinstance(a, list | tuple) else [a])]


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node takes from a random generator."""
    return has_tag(node.target, torch.Tag.nondeterministic_seeded)


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch tags a node's operation as pointwise."""
    return has_tag(node.target, torch.Tag.pointwise)
