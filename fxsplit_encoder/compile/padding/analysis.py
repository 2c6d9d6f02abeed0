"""Which pieces may be padded: a proof that their rows are independent along the token dimension.

Every tensor of the region is given a state by one pass over its ATen nodes:

* `Rows(dim)`: entry j along `dim` is computed from the tokens of group j alone (a group is one token, or the
  few that a spatial merge joins). Tokens appended at the end therefore append entries and change none before
  them. The last is all that the proof rests on, so `fxsplit::permute_rows` keeps the state: it permutes the
  real rows among themselves, whatever is appended.
* `SHARED`: the same whatever the tokens are (weights, tables, scalars).
* `SEGMENTS`: cumulative lengths, which only attention may read; the capture extends them by empty segments.
* `Mixed(reason)`: anything else; rows may depend on one another, or no rule is known.

A region without `Mixed` may be padded: its real rows equal those of the unpadded run. Rules are by operation;
pointwise operations are recognised by their tag, so most need none. Whatever the rule says, a tensor may
depend on the padded sizes (the token count, the number of segments) only through the size of its one token
dimension.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from fxsplit_encoder.compile.padding.rules import (
    ATTENTIONS,
    CONSTRUCTORS,
    COPIES,
    DENSE_ATTENTIONS,
    LOOKUPS,
    MOVERS,
    RULES,
    SIZED,
    pointwise,
)
from fxsplit_encoder.compile.padding.states import (
    SEGMENTS,
    SHARED,
    Mixed,
    NodeView,
    NotProvedError,
    Rows,
    State,
    draws_random_numbers,
    indices_of,
    is_pointwise,
    operation,
    symbols_of,
)
from fxsplit_encoder.compile.sizes import Size, SymbolValues, shape_exprs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class PaddingReport:
    """The outcome of the analysis."""

    reasons: tuple[tuple[str, str], ...]
    """(node, reason) for every node that mixed rows itself; empty when padding is proved."""
    may_probe: bool = True
    """Whether a padded run is safe to try; False when pad rows may look up out of range or hold garbage."""
    mixed: frozenset[str] = frozenset()
    """Every node that is not proved: those of `reasons`, and what is computed from them."""

    @property
    def proved(self) -> bool:
        """Whether the region may be padded."""
        return not self.reasons

    def __str__(self) -> str:
        return (
            "proved" if self.proved else "; ".join(f"{node}: {reason}" for node, reason in self.reasons[:3])
        )


def analyse(
    nodes: Sequence[fx.Node],
    seeds: Mapping[fx.Node, State],
    token_symbol: str,
    accepts: Callable[[SymbolValues], bool] = lambda values: True,
) -> PaddingReport:
    """Proves or refutes row independence of a region.

    Args:
        nodes: the region's nodes in order, each with its traced value in `meta["val"]`.
        seeds: the states of the tensors that enter the region.
        token_symbol: the name of the symbol that counts tokens.
        accepts: whether the trace holds for these values of symbols.
    """
    analysis = Analysis(dict(seeds), token_symbol, accepts)
    if len(analysis.samples) < 2:
        return PaddingReport((("graph", f"the trace holds for {analysis.samples} tokens only"),))
    reasons = [*analysis.check_seeds(), *analysis.visit_all(nodes)]
    mixed = frozenset(node.name for node in nodes if isinstance(analysis.states.get(node), Mixed))
    return PaddingReport(tuple(reasons), analysis.may_probe, mixed)


def _sample(accepts: Callable[[int], bool]) -> list[int]:
    """Token counts that the trace holds for, at which sizes are compared."""
    samples = [n for n in range(2, 4097) if accepts(n)]
    if len(samples) < 2:
        samples = list(itertools.islice((n for n in range(2, 2**18) if accepts(n)), 2))
    return samples


class Analysis:
    """One pass over a region."""

    def __init__(
        self, states: dict[fx.Node, State], token_symbol: str, accepts: Callable[[SymbolValues], bool]
    ) -> None:
        self.states = states
        self.seeds = frozenset(states)
        self.symbol = token_symbol
        self.may_probe = True
        self.samples = _sample(lambda tokens: accepts({token_symbol: tokens}))
        self._varying: dict[sympy.Expr, bool] = {}
        # The symbols whose values differ between a padded run and the exact one.
        self.padded_symbols = {token_symbol}
        for node, state in states.items():
            if state is SEGMENTS:
                self.padded_symbols.update(s for e in shape_exprs(node.meta["val"]) for s in symbols_of(e))

    def check_seeds(self) -> Iterable[tuple[str, str]]:
        """The inputs whose sizes padding changes in more than one dimension, and why that is refused."""
        for node in self.seeds:
            if self.states[node] is SEGMENTS:
                continue
            try:
                self.check_extents(node.meta["val"], self.states[node])
            except NotProvedError as error:
                self.states[node] = Mixed(str(error))
                yield node.name, str(error)

    def visit_all(self, nodes: Sequence[fx.Node]) -> Iterable[tuple[str, str]]:
        """Gives every node a state; yields those that mix rows themselves, and why."""
        for node in nodes:
            inputs = [self.states[n] for n in node.all_input_nodes if n in self.states]
            if operation(node) in LOOKUPS and not self.looks_up_safely(node):
                self.may_probe = False
            inherited = next((s for s in inputs if isinstance(s, Mixed)), None)
            if inherited is not None:
                self.states[node] = inherited
                continue
            try:
                state = self.state_of(node, inputs)
                self.check_extents(node.meta["val"], state)
                self.states[node] = state
            except NotProvedError as error:
                self.states[node] = Mixed(str(error))
                yield node.name, str(error)

    def state_of(self, node: fx.Node, inputs: Sequence[State]) -> State:
        """The state of a node whose inputs have these; raises NotProvedError where it mixes rows."""
        name = operation(node)
        if name == "getitem":
            source, index = node.args
            state = self.states[source]  # type: ignore[index]
            return state[index] if isinstance(state, list) else state  # type: ignore[index]
        if name not in DENSE_ATTENTIONS and draws_random_numbers(node):
            raise NotProvedError(f"{name} draws random numbers, whose order depends on the token count")
        if SEGMENTS in inputs and name not in ATTENTIONS:
            raise NotProvedError(f"{name} reads the segments' cumulative lengths; only attention may")
        if name not in SIZED and self.reads_token_count(node):
            raise NotProvedError(f"{name} computes with the token count or the number of segments")
        if not any(isinstance(s, Rows | list) for s in inputs) and name not in CONSTRUCTORS | COPIES:
            return SHARED
        rule = RULES.get(name) or (pointwise if is_pointwise(node) else None)
        if rule is None:
            raise NotProvedError(f"no padding rule for {name}")
        return rule(NodeView(self, node))

    def reads_token_count(self, node: fx.Node) -> bool:
        """Whether a scalar argument depends on a size that padding changes."""
        values = (n.meta.get("val") for n in node.all_input_nodes)
        return any(
            not self.padded_symbols.isdisjoint(str(s) for s in v.node.expr.free_symbols)
            for v in values
            if isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool)
        )

    def check_extents(self, value: Any, state: State) -> None:
        """No size but that along the token dimension may depend on what padding changes."""
        values = value if isinstance(value, list | tuple) else [value]
        states = state if isinstance(state, list) else [state] * len(values)
        for tensor, tensor_state in zip(values, states, strict=True):
            if not isinstance(tensor, torch.Tensor):
                continue
            rows = tensor_state.dim if isinstance(tensor_state, Rows) else None
            for dim, expr in enumerate(shape_exprs(tensor)):
                varies = self.varies(expr)
                if varies and dim != rows:
                    raise NotProvedError(
                        f"dimension {dim} of {tuple(tensor.shape)} changes with the padding too"
                    )
                if not varies and dim == rows:
                    raise NotProvedError(
                        f"dimension {dim} of {tuple(tensor.shape)} does not count tokens any more"
                    )

    def varies(self, expr: sympy.Expr) -> bool:
        """Whether padding changes a size. Some that name the token symbol do not: s // (s // 4) is 4 where it
        is traced.
        """
        if expr not in self._varying:
            symbols = symbols_of(expr)
            varies = not self.padded_symbols.isdisjoint(symbols)
            if varies and symbols == {self.symbol}:
                size = Size(expr)
                varies = len({size({self.symbol: n}) for n in self.samples}) > 1
            self._varying[expr] = varies
        return self._varying[expr]

    def are_equal(self, one: sympy.Expr, other: sympy.Expr) -> bool:
        """Whether two sizes are always the same. Some are spelled in two ways: 4 * (s // 4) is s where it is
        traced.
        """
        if one == other:
            return True
        if symbols_of(one) | symbols_of(other) != {self.symbol}:
            return False
        a, b = Size(one), Size(other)
        return all(a({self.symbol: n}) == b({self.symbol: n}) for n in self.samples)

    def looks_up_safely(self, node: fx.Node) -> bool:
        """Whether the indices of pad rows are in range: they are the zeros of an input's pad rows, not
        computed.
        """
        indices = [i for i in indices_of(node) if isinstance(i, fx.Node)]
        return all(self._is_an_input(index) for index in indices)

    def _is_an_input(self, node: fx.Node) -> bool:
        while node not in self.seeds and self.states.get(node, SHARED) is not SHARED:
            if operation(node) not in MOVERS:
                return False
            node = node.all_input_nodes[0]
        return True
