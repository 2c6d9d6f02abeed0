"""Proves that a graph may be padded: that its real rows do not depend on pad rows.

Take one graph with n tokens, and with B >= n tokens of which the first n are the same and the others
anything. One pass over its ATen nodes gives every tensor a state, a statement about the two runs:

* `Rows(dim)`: the size along `dim` is E(n) in one run and E(B) >= E(n) in the other, all other sizes are
  equal, and the first E(n) entries along `dim` are equal. `Rows(dim, blocks)`: the same of each of so many
  equal blocks of that dimension; such rows may not leave the graph.
* `SHARED`: sizes and values are equal.
* `SEGMENTS`: cumulative lengths, which the capture extends by empty segments; only attention may read them.
* `Mixed(reason)`: nothing is known.

Inputs have states by how captures fill them. A rule for each operation gives the state of its result for
those of its arguments; its docstring says why (the lemma). Sizes are decided by algebra, see `TokenSizes`. So
a region without `Mixed` may be padded: the real rows of its outputs equal those of the unpadded run, but for
rounding where a kernel adds in another order at another size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from fxsplit_encoder._torch.tensors import storage_id
from fxsplit_encoder.compile.padding.rules import (
    ATTENTIONS,
    CONSTRUCTORS,
    COPIES,
    DENSE_ATTENTIONS,
    RULES,
    SIZED,
    SIZED_WITH_ROWS,
    pointwise,
)
from fxsplit_encoder.compile.padding.states import (
    SEGMENTS,
    SHARED,
    Mixed,
    NodeView,
    Rows,
    State,
    TokenSizes,
    draws_random_numbers,
    is_pointwise,
    operation,
    reads_token_count,
    scalar_arguments,
    symbols_of,
    token_dim,
)
from fxsplit_encoder.compile.rewriting import arguments_of
from fxsplit_encoder.compile.sizes import expression, shape_exprs

__all__ = ["SEGMENTS", "SHARED", "PaddingReport", "Rows", "State", "analyse", "capture_refusal", "token_dim"]


@dataclass(frozen=True, slots=True)
class PaddingReport:
    """The outcome of the analysis."""

    reasons: tuple[tuple[str, str], ...]
    """(node, reason) for every node that mixed rows itself; empty when padding is proved."""
    mixed: frozenset[str] = frozenset()
    """Every node that is not proved: those of `reasons`, and those computed from them."""
    joined: Mapping[str, Rows] = field(default_factory=dict, compare=False)
    """Nodes whose rows lie in several blocks: tokens that are joined with an outer dimension."""
    segments_may_grow: bool = True
    """Whether empty segments may be appended: only attention reads the cumulative lengths."""
    capture_refusal: str = ""
    """Why nothing may be captured at any size: the graph draws random numbers."""
    other_rows: str = ""
    """Why attention runs over other rows than the tokens: such a graph is captured by all of its sizes, and
    never padded."""
    divisor: int = 1
    """A number that divides every token count for which the trace holds."""
    declared: bool = False
    """Whether the tower declares that padding leaves its real rows alone."""
    num_nodes: int = field(default=0, compare=False)
    source: str = field(default="", compare=False)
    """The line of the module's code of the first reason, where the trace knows it."""

    @property
    def proved(self) -> bool:
        """Whether the real rows of the region are proved not to depend on pad rows."""
        return not self.reasons

    @property
    def allowed(self) -> bool:
        """Whether the region may be padded: it is proved, or the tower declares it."""
        return self.proved or self.declared

    def __str__(self) -> str:
        return "; ".join(f"{node}: {reason}" for node, reason in self.reasons[:3]) or "proved"


def analyse(
    nodes: Sequence[fx.Node],
    seeds: Mapping[fx.Node, State],
    token_symbol: str,
    assumptions: Iterable[sympy.Basic] = (),
    outputs: Sequence[fx.Node] = (),
) -> PaddingReport:
    """Proves that a region may be padded, or reports where the proof fails.

    Args:
        nodes: the region's nodes in order, each with its traced value in `meta["val"]`.
        seeds: the states of the tensors that enter the region.
        token_symbol: the name of the symbol that counts tokens.
        assumptions: the trace's assumptions on its symbols, as expressions.
        outputs: the region's results, which are cut to the size of the unpadded run.
    """
    segments = {
        symbol
        for node, state in seeds.items()
        if state is SEGMENTS
        for size in shape_exprs(node.meta["val"])
        for symbol in symbols_of(size)
    }
    analysis = Analysis(dict(seeds), TokenSizes(token_symbol, segments, assumptions))
    reasons = [
        ("graph", f"the trace assumes {guard.lhs} == {guard.rhs}, which may hold for few token counts")
        for guard in analysis.sizes.unmet
    ]
    reasons += [*analysis.check_seeds(), *analysis.visit_all(nodes)]
    states = analysis.states
    joined = {n: s for n, s in states.items() if isinstance(s, Rows) and s.blocks != 1}
    reasons += [
        (node.name, "tokens leave the graph joined with an outer dimension")
        for node in outputs
        if node in joined
    ]
    tensors = {node: node.meta["val"] for node in outputs if isinstance(node.meta["val"], torch.Tensor)}
    num_over = Counter(map(storage_id, tensors.values()))
    reasons += [
        (node.name, "outputs share memory, in strides that change with the token count")
        for node, value in tensors.items()
        for size, stride in zip(shape_exprs(value), value.stride(), strict=True)
        if num_over[storage_id(value)] > 1 and size != 1 and token_symbol in symbols_of(expression(stride))
    ]
    mixed = [node for node in nodes if isinstance(states.get(node), Mixed)]
    return PaddingReport(
        tuple(reasons),
        mixed=frozenset(node.name for node in mixed),
        joined={node.name: joined[node] for node in nodes if node in joined},
        segments_may_grow=not (analysis.reads_segments or analysis.other_rows),
        capture_refusal=capture_refusal(nodes),
        other_rows=analysis.other_rows,
        divisor=analysis.sizes.divisor,
        num_nodes=len(nodes),
        source=_source_line(mixed[0]) if mixed else "",
    )


def _source_line(node: fx.Node) -> str:
    """Returns the innermost line of the module's code that made a node: `file:line, in function: code`."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    at = next((i for i in reversed(range(len(lines))) if lines[i].startswith("File ")), None)
    if at is None:
        return ""
    _, path, rest = lines[at].split('"', 2)
    code = f": {lines[at + 1]}" if at + 1 < len(lines) else ""
    return f"{path}:{rest.removeprefix(', line ')}{code}"


def capture_refusal(nodes: Sequence[fx.Node]) -> str:
    """Returns why a region may never be captured; empty: it may."""
    for node in nodes:
        name = operation(node)
        is_dense = name in DENSE_ATTENTIONS
        if draws_random_numbers(node) and not (is_dense and not arguments_of(node).get("dropout_p")):
            return f"{name} draws random numbers"
    values = [node.meta.get("val") for node in nodes]
    devices = {str(value.device) for value in values if isinstance(value, torch.Tensor)} - {"cpu"}
    if len(devices) > 1:  # a graph is captured on a stream of one
        return f"it computes on several devices: {', '.join(sorted(devices))}"
    return ""


class Analysis:
    """One pass over a region."""

    def __init__(self, states: dict[fx.Node, State], sizes: TokenSizes) -> None:
        self.states = states
        self.seeds = frozenset(states)
        self.sizes = sizes
        self.reads_segments = False
        self.other_rows = ""

    def check_seeds(self) -> Iterable[tuple[str, str]]:
        """Yields inputs whose sizes padding changes in more than one dimension."""
        for node in self.seeds:
            if self.states[node] is SEGMENTS:
                continue
            try:
                self.check_extents(node.meta["val"], self.states[node])
            except Mixed as mixed:
                self.states[node] = mixed.with_traceback(None)
                yield node.name, str(mixed)

    def visit_all(self, nodes: Sequence[fx.Node]) -> Iterable[tuple[str, str]]:
        """Gives every node a state; yields those that mix rows themselves, and why."""
        for node in nodes:
            inputs = [self.states[n] for n in node.all_input_nodes if n in self.states]
            self.reads_segments |= self._reads_segments(node, inputs)
            self.other_rows = self.other_rows or self._other_rows(node)
            inherited = next((s for s in inputs if isinstance(s, Mixed)), None)
            if inherited is not None:
                self.states[node] = inherited
                continue
            try:
                state = self.state_of(node, inputs)
                if isinstance(state, Mixed):  # one of several results
                    raise state
                self.check_extents(node.meta.get("val"), state)
                self.states[node] = state
            except Mixed as mixed:
                self.states[node] = mixed.with_traceback(None)
                yield node.name, str(mixed)

    def state_of(self, node: fx.Node, inputs: Sequence[State]) -> State:
        """Returns the state of a node; raises Mixed where it mixes rows."""
        name = operation(node)
        if name == "getitem":
            source, index = node.args
            state = self.states[source]  # type: ignore[index]
            return state[index] if isinstance(state, list) else state  # type: ignore[index]
        if name not in DENSE_ATTENTIONS and draws_random_numbers(node):
            raise Mixed(f"{name} draws random numbers, whose order depends on the token count")
        if SEGMENTS in inputs and name not in ATTENTIONS:
            raise Mixed(f"{name} reads the segments' cumulative lengths; only attention may")
        takes_rows = any(isinstance(s, Rows | list) for s in inputs)
        is_sized = name in SIZED or (takes_rows and name in SIZED_WITH_ROWS)
        if not is_sized and reads_token_count(node, self.sizes):
            raise Mixed(f"{name} computes with the token count or the number of segments")
        if not takes_rows and name not in CONSTRUCTORS | COPIES:
            return SHARED
        rule = RULES.get(name) or (pointwise if is_pointwise(node) else None)
        if rule is None:
            raise Mixed(f"no padding rule for {name}")
        return rule(NodeView(node, self.states, self.seeds, self.sizes))

    def check_extents(self, value: Any, state: State) -> None:
        """Raises Mixed if padding changes a size outside of the token dimension."""
        values = value if isinstance(value, list | tuple) else [value]
        states = state if isinstance(state, list) else [state] * len(values)
        if len(states) != len(values):
            raise Mixed("it has another number of results than its rule knows")
        for tensor, tensor_state in zip(values, states, strict=True):
            if not isinstance(tensor, torch.Tensor):
                continue
            rows = tensor_state.dim if isinstance(tensor_state, Rows) else None
            if rows is not None and rows >= tensor.dim():
                raise Mixed(f"one of its results, {tuple(tensor.shape)}, does not count tokens")
            for dim, expr in enumerate(shape_exprs(tensor)):
                if dim == rows and not self.sizes.counts_rows(expr):
                    raise Mixed(f"dimension {dim} of {tuple(tensor.shape)} does not count tokens any more")
                if dim != rows and self.sizes.varies(expr):
                    raise Mixed(f"dimension {dim} of {tuple(tensor.shape)} changes with the padding too")

    def _other_rows(self, node: fx.Node) -> str:
        if operation(node) == "varlen_attention":
            query = node.args[0]
            assert isinstance(query, fx.Node)
            rows = shape_exprs(query.meta["val"])[0]
            if not self.sizes.count_tokens(rows):
                return f"attention runs over {rows} rows, which are not the {self.sizes.token_symbol} tokens"
        return ""

    def _reads_segments(self, node: fx.Node, inputs: Sequence[State]) -> bool:
        """Whether more segments would change a node's result: it reads their lengths or their number."""
        if SEGMENTS in inputs and operation(node) not in ATTENTIONS:
            return True
        values = node.meta.get("val")
        tensors = values if isinstance(values, list | tuple) else [values]
        sizes = [size for t in tensors if isinstance(t, torch.Tensor) for size in shape_exprs(t)]
        return any(
            not self.sizes.segment_symbols.isdisjoint(symbols_of(expr))
            for expr in (*scalar_arguments(node), *sizes)
        )
