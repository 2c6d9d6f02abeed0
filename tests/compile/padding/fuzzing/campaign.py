"""A random graph around an operation, and what became of it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxsplit_encoder.compile import padding
from fxsplit_encoder.compile.padding import Rows
from fxsplit_encoder.compile.padding.rules import RULES
from fxsplit_encoder.compile.padding.states import operation
from fxsplit_encoder.compile.sizes import assumptions_of, guards_of

from .builder import Builder, SpecializedError
from .calls import OPERATIONS, POINTWISE, call
from .comparison import NotRunnableError, Wrong, compare, pairs, run_exact
from .inputs import GARBAGE, NUM_LENGTHS

_SMALL = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 20, 24, 30, 36, 40, 48, 60, 64, 72, 96, 120, 144)
# Around the largest constant of graphs.
_BELOW = (4992, 4999)
_ABOVE = (5000, 5003, 5016, 10007, 10008)
_MOST_ENTRIES = 300_000
_ATTEMPTS = 6

FOCUSES = tuple(OPERATIONS)
"""What graphs are made around, one after another."""
# Tracing an interpolation takes as long as ten other calls.
_QUICK = tuple(name for name in sorted(RULES) if "upsample" not in name)


def seeds_around(name: str, count: int) -> list[int]:
    """Seeds of graphs that all call an operation."""
    first = FOCUSES.index(name)
    return list(range(first, first + count * len(FOCUSES), len(FOCUSES)))


@dataclass(frozen=True)
class Outcome:
    """What became of one graph.

    Args:
        operations: what it calls: names that rules go by, and pointwise overloads.
        accepted: those of which some call is proved.
        wrong: what the proof says and is not so, if anything.
    """

    operations: frozenset[str]
    accepted: frozenset[str]
    wrong: str


def run_seed(seed: int) -> Outcome:
    """The first graph of a seed that traces and runs."""
    for attempt in range(1000):
        outcome = _attempt(seed, 1000 * seed + attempt)
        if outcome is not None:
            return outcome
    raise AssertionError(f"seed {seed} makes no graph around {FOCUSES[seed % len(FOCUSES)]}")


def build(seed: int, graph_seed: int) -> Builder | None:
    """A graph; None if it has no call of what the seed is about."""
    b = Builder(graph_seed)
    focus = FOCUSES[seed % len(FOCUSES)]
    length = b.random.randint(1, 8)
    at = b.random.randrange(length)
    try:
        for step in range(length):
            if step != at:
                call(b, b.choice(_QUICK if b.chance(0.7) else tuple(POINTWISE)))
            elif not any(call(b, focus) is not None for _ in range(_ATTEMPTS)):
                return None
    except (SpecializedError, GuardOnDataDependentSymNode):
        return None  # as AOT would not trace it
    return b


def _attempt(seed: int, graph_seed: int) -> Outcome | None:
    b = build(seed, graph_seed)
    if b is None:
        return None
    counts = _counts(b)
    if len(counts) < 2:
        return None
    try:
        report = padding.analyse(b.nodes, b.seeds, b.symbol, assumptions_of(list(b.sources)))
    except Exception as error:
        wrong = Wrong(b.nodes[-1], f"the analysis fails: {error!r}", counts[0], counts[-1], "no")
        return Outcome(frozenset(), frozenset(), _described(b, wrong))
    whole = any(node == "graph" for node, _ in report.reasons)
    mixed = frozenset(node.name for node in b.nodes) if whole else report.mixed
    try:
        wrong = _search(b, counts, mixed, report.joined)
    except NotRunnableError:
        return None
    names = {node: _names(node) for node in b.nodes}
    accepted = frozenset(n for node in b.nodes if node.name not in mixed for n in names[node])
    generated = frozenset(n for node in b.nodes for n in names[node])
    return Outcome(generated, accepted, _described(b, wrong) if wrong else "")


def _names(node: fx.Node) -> tuple[str, ...]:
    target = node.target
    overload = (
        f"{target._schema.name.split('::')[1]}.{target._overloadname}" if hasattr(target, "_schema") else ""
    )
    return (operation(node), overload)


def _counts(b: Builder) -> list[int]:
    """Token counts for which the trace holds, some of them larger than any constant of the graph."""
    holds = guards_of(list(b.sources))

    def accepts(count: int) -> bool:
        others = [{b.segment_symbol: number} for number in NUM_LENGTHS] if b.segment_symbol else [{}]
        return all(holds({b.symbol: count, **other}) for other in others)

    chance = random.Random(b.seed)
    small = [count for count in _SMALL if accepts(count)]
    chosen = chance.sample(small, min(3, len(small)))
    if (b.large_constants or len(small) < 2 or chance.random() < 0.1) and not _grows_large(b):
        below, above = ([c for c in counts if accepts(c)] for counts in (_BELOW, _ABOVE))
        chosen = [*chosen[:1], *chance.sample(above, min(2, len(above)))]
        if len(chosen) < 3:
            chosen += below[:1]
    return sorted(chosen)


def _grows_large(b: Builder) -> bool:
    """Whether thousands of tokens make tensors too large to run many graphs, inside of an operation too."""
    attended = [n.args[0] for n in b.nodes if "attention" in str(n.target)]
    if any(isinstance(query.meta["val"].shape[-2], torch.SymInt) for query in attended):
        return True
    shapes = (node.meta["val"].shape for node in b.values)
    return any(math.prod(_largest_size(b, size) for size in shape) > _MOST_ENTRIES for shape in shapes)


def _largest_size(b: Builder, size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.expr.subs({symbol: _ABOVE[-1] for symbol in size.node.expr.free_symbols}))


def _search(b: Builder, counts: list[int], mixed: frozenset[str], joined: Mapping[str, Rows]) -> Wrong | None:
    chance = random.Random(b.seed)
    sources = {node: make(counts[-1]) for node, make in b.sources.items()}
    with torch.no_grad():
        exact = {count: run_exact(b.graph, sources, count) for count in counts}
        for pair in pairs(counts):
            garbage = chance.choice(GARBAGE)
            wrong = compare(b.graph, sources, mixed, joined, exact[pair[0]], pair, garbage)
            if wrong is not None:
                return wrong
    return None


def _described(b: Builder, wrong: Wrong) -> str:
    """The wrong node and what it is computed from."""
    needed, pending = set(), [wrong.node]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    lines = []
    for node in b.graph.nodes:
        if node in needed:
            value = node.meta["val"]
            shape = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else value
            given = f" [{b.seeds.get(node, 'weight')}]" if node in b.sources else f" {node.target}"
            lines.append(f"    {node.name}:{given} {node.args} {node.kwargs or ''} -> {shape}")
    counts = f"{wrong.count} of {wrong.padded_count} tokens, {wrong.garbage} garbage"
    return "\n".join((f"{wrong.node.name} with {counts}: {wrong.why}", *lines))
