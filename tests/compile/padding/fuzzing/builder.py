"""A graph that grows call by call, traced with a symbolic token count as a compiler's trace is."""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxsplit_encoder.compile.padding import SEGMENTS, SHARED, Rows, State, token_dim

from . import inputs
from .inputs import MakeSource, Source, draw, draw_rows, seeded

aten = torch.ops.aten
# Every call that is refused would be logged.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

# Divisible by much, so that views that merge tokens trace; the last is larger than any constant of a graph.
_TRACED_COUNTS = (72, 120, 24 * 43, 24 * 43, 24 * 1009, 24 * 1009)
LARGE = (4096, 5000)
"""Constants that only large token counts exceed."""


class SpecializedError(Exception):
    """The trace turned the token count into a number, or divided by zero."""


@dataclass(frozen=True)
class Extent:
    """How many entries a token count means: the traced size, and the same for a number."""

    size: Any
    of: Callable[[int], int]


class Builder:
    """A graph under construction.

    Args:
        seed: of the graph's structure and of its inputs' values.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.graph = fx.Graph()
        self.shape_env = ShapeEnv()
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env)
        self.fake_mode.cache_enabled = False  # entries take longer to make than they save
        self.num_tokens = self._symbol("tokens", self.random.choice(_TRACED_COUNTS))
        self.symbol = str(self.num_tokens.node.expr)
        self.seeds: dict[fx.Node, State] = {}
        self.sources: dict[fx.Node, MakeSource] = {}
        self.values: list[fx.Node] = []
        """Every tensor so far."""
        self.nodes: list[fx.Node] = []
        """What the proof sees: calls that return tensors."""
        self.large_constants = False
        self.segment_symbol: str | None = None
        self._segments: fx.Node | None = None

    def _symbol(self, name: str, hint: int) -> torch.SymInt:
        symbol = self.shape_env.create_symbol(hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
        return self.shape_env.create_symintnode(symbol, hint=hint)

    # --- chances

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    # --- inputs

    def _placeholder(self, shape: Sequence[Any], dtype: torch.dtype, source: MakeSource) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.sources)}")
        with self.fake_mode:
            node.meta["val"] = torch.empty(list(shape), dtype=dtype)
        self.sources[node] = source
        self.values.append(node)
        return node

    def _next_seed(self) -> int:
        return self.seed * 1009 + len(self.sources)

    def shared(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> fx.Node:
        """A weight, which may or may not be among the inputs that change from call to call."""
        value = draw(list(shape), dtype, seeded(self._next_seed()))
        node = self._placeholder(shape, dtype, lambda largest: Source(lambda count: value))
        if self.chance(0.3):
            self.seeds[node] = SHARED
        return node

    def rows(self, shape: Sequence[int], dim: int, dtype: torch.dtype = torch.float64) -> fx.Node:
        """An input with a row per token, or per several, along `dim`; its size in `shape` is ignored."""
        extent = self.extent()
        sizes: list[Any] = list(shape)
        sizes[dim] = extent.size
        source = inputs.rows(dim, extent.of, draw_rows(list(shape), dim, dtype), self._next_seed())
        node = self._placeholder(sizes, dtype, source)
        self.seeds[node] = Rows(dim)
        assert token_dim(node.meta["val"], self.symbol) == dim
        return node

    def extent(self) -> Extent:
        n = self.num_tokens
        if self.chance(0.85):
            return Extent(n, lambda count: count)
        k = self.choice((2, 4))
        kind = self.choice(("parts", "equal parts", "several", "more"))
        if kind == "equal parts":
            if n % k == 0:  # the trace remembers
                return Extent(n // k, lambda count: count // k)
            return Extent(n, lambda count: count)
        return {
            "parts": Extent(n // k, lambda count: count // k),
            "several": Extent(n * k, lambda count: count * k),
            "more": Extent(n + k, lambda count: count + k),
        }[kind]

    def token_rows(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> fx.Node:
        """An input with exactly a row per token, along dimension 0."""
        source = inputs.rows(0, lambda count: count, draw_rows([0, *shape], 0, dtype), self._next_seed())
        node = self._placeholder([self.num_tokens, *shape], dtype, source)
        self.seeds[node] = Rows(0)
        return node

    def permutation(self) -> fx.Node:
        """A permutation of the tokens."""
        source = inputs.permutation(self._next_seed())
        node = self._placeholder([self.num_tokens], torch.int64, lambda largest: source)
        self.seeds[node] = Rows(0)
        return node

    def segments(self) -> fx.Node:
        """Cumulative lengths."""
        if self._segments is None:
            size = self._symbol("segments", 37)
            self.segment_symbol = str(size.node.expr)
            self._segments = self._placeholder([size], torch.int32, lambda largest: inputs.segments())
            self.seeds[self._segments] = SEGMENTS
        return self._segments

    # --- calls

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        """Appends a call; None where the trace refuses its arguments.

        Raises:
            SpecializedError: the call holds for one token count only.
        """
        value = self._trace(target, args, kwargs)
        if value is None:
            return None
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._add(node)
        else:
            self.nodes.append(node)
            for index, part in enumerate(value[: _read(target, value)]):
                if isinstance(part, torch.Tensor):
                    self._add(self._getitem(node, index, part))
        return node

    def _trace(self, target: Any, args: Any, kwargs: Any) -> Any:
        def traced(argument: Any) -> Any:
            return fx.node.map_arg(argument, lambda n: n.meta["val"])

        try:
            # As AOT traces: operations made of others take symbolic sizes.
            with self.fake_mode, enable_python_dispatcher(), torch.no_grad():
                value = target(*traced(args), **traced(kwargs))
        except Exception:  # whatever a random call raises: it is not part of the graph
            value = None
        finally:
            if self.shape_env.replacements:
                raise SpecializedError
        several = isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)
        return value if several or isinstance(value, torch.Tensor) else None

    def _getitem(self, node: fx.Node, index: int, value: torch.Tensor) -> fx.Node:
        part = self.graph.call_function(operator.getitem, (node, index))
        part.meta["val"] = value
        return part

    def _add(self, node: fx.Node) -> None:
        self.nodes.append(node)
        self.values.append(node)

    def number(self, function: Callable[..., Any], *args: Any) -> Any:
        """Arithmetic on sizes: a node, or a number where that is what the trace makes of it."""
        try:
            value = function(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        except ZeroDivisionError as error:
            raise SpecializedError from error
        if self.shape_env.replacements:
            raise SpecializedError
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        node = self.graph.call_function(function, args)
        node.meta["val"] = value
        return node

    # --- sizes

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size of a tensor: a number, or the node that asks for it."""
        size = node.meta["val"].shape[dim]
        return self.number(aten.sym_size.int, node, dim) if isinstance(size, torch.SymInt) else size

    def sizes(self, node: fx.Node) -> list[Any]:
        return [self.size(node, dim) for dim in range(node.meta["val"].dim())]

    def token_dims(self, node: fx.Node) -> list[int]:
        """The dimensions whose size is not a number."""
        return [d for d, size in enumerate(node.meta["val"].shape) if isinstance(size, torch.SymInt)]

    def count(self) -> Any:
        """A number that follows the token count."""
        symbolic = [v for v in self.values if self.token_dims(v) and v is not self._segments]
        node = self.choice(symbolic) if symbolic else self.rows([0, 3], 0)
        n = self.size(node, self.choice(self.token_dims(node)))
        if self._segments is not None and self.chance(0.1):
            n = self.size(self._segments, 0)
        k = self.choice((1, 2, 3, 4))
        plain: list[Callable[[], Any]] = [
            lambda: n,
            lambda: n,
            lambda: self.number(operator.floordiv, n, k),
            lambda: self.number(operator.mul, n, k),
            lambda: self.number(operator.add, n, k),
            lambda: self.number(operator.sub, n, 1),
            lambda: self.number(operator.mod, n, k + 1),
            lambda: self.number(operator.sub, n, self.number(operator.floordiv, n, 2)),
        ]
        limited: list[Callable[[], Any]] = [
            lambda: self.number(torch.sym_max, n, self.limit()),
            lambda: self.number(torch.sym_min, n, self.limit()),
            lambda: self.number(operator.add, self.number(operator.floordiv, n, self.limit()), 1),
        ]
        kinds = limited if self.chance(0.3) else plain
        return self.choice(kinds)()

    def limit(self) -> int:
        """A constant that some token counts exceed."""
        self.large_constants = self.large_constants or self.chance(0.6)
        return self.choice(LARGE) if self.large_constants else self.choice((5, 10, 20))

    # --- arguments

    def pick(self, matches: Callable[[torch.Tensor], bool] = lambda value: True) -> fx.Node | None:
        """A tensor of the graph, rather a late one."""
        found = [v for v in self.values if v is not self._segments and matches(v.meta["val"])]
        if not found:
            return None
        return found[-1] if self.chance(0.5) else self.choice(found)

    def floats(self, rank: int | None = None, at_least: int = 1) -> fx.Node:
        """Floats of a rank, most often with rows."""

        def fits(value: torch.Tensor) -> bool:
            ranked = value.dim() >= at_least if rank is None else value.dim() == rank
            return ranked and value.is_floating_point()

        node = self.pick(lambda v: fits(v) and (any(isinstance(s, torch.SymInt) for s in v.shape)))
        if node is not None and self.chance(0.85):
            return node
        return self.new_floats(rank or self.choice([r for r in (1, 2, 2, 3, 3, 4) if r >= at_least]))

    def new_floats(self, rank: int) -> fx.Node:
        """Rows of floats, which have their own dimension first, most often."""
        shape = [self.choice((1, 2, 3, 4, 4)) for _ in range(rank)]
        dim = 0 if self.chance(0.6) else self.random.randrange(rank)
        return self.rows(shape, dim)

    def integers(self) -> fx.Node:
        """Integers, most often rows of an input."""
        node = self.pick(lambda v: v.dtype in (torch.int64, torch.int32) and v.dim() > 0)
        if node is not None and self.chance(0.5):
            return node
        shape, dim = self.choice((([0], 0), ([0], 0), ([0, 2], 0), ([2, 0], 1), ([0, 1], 0)))
        return self.rows(shape, dim, self.choice((torch.int64, torch.int64, torch.int32)))

    def dim(self, node: fx.Node, safe: float = 0.75, extra: int = 0) -> int:
        """A dimension, more likely one that does not count tokens; from the front or the back."""
        rank = node.meta["val"].dim() + extra
        if rank == 0:
            return self.choice((0, -1))
        others = [d for d in range(rank) if d not in self.token_dims(node)]
        dim = self.choice(others) if others and self.chance(safe) else self.random.randrange(rank)
        return dim - rank if self.chance(0.5) else dim

    def dims(self, node: fx.Node, safe: float = 0.8) -> list[int]:
        """Several dimensions, each once; none at all now and then."""
        rank = node.meta["val"].dim()
        chosen = {self.dim(node, safe) % max(rank, 1) for _ in range(self.choice((1, 1, 2, 3)))}
        if self.chance(0.03):
            return []
        return [d - rank if self.chance(0.3) else d for d in chosen]

    def scalar(self) -> Any:
        """A number; one that follows the token count now and then."""
        if self.chance(0.03):
            return self.count()
        return self.choice((0, 1, -1, 2, 3, 0.5, -1.5, 5000))

    def flag(self) -> bool:
        return self.chance(0.5)


def _read(target: Any, results: Sequence[Any]) -> int:
    """How many results of an operation are read. Of attention, others than flash's sums of logits have shapes
    that are each kernel's own.
    """
    if "attention" not in str(target):
        return len(results)
    return 2 if "flash" in str(target) else 1
