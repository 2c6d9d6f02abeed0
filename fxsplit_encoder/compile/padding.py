"""Which pieces may be padded: a proof that their rows are independent along the token dimension.

Every tensor of the region is given a state by one pass over its ATen nodes:

* `Rows(dim)`: entry j along `dim` is computed from the tokens of group j alone (a group is one token, or the
  few that a spatial merge joins). Tokens appended at the end therefore append entries and change none before
  them.
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

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from fxsplit_encoder.compile.sizes import Size, SymbolValues, expression, shape_exprs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Rows:
    """Independent along `dim`."""

    dim: int


@dataclass(frozen=True, slots=True)
class Mixed:
    """Not proved independent, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


SHARED = _Named("shared")
SEGMENTS = _Named("segments")
State = Any
"""Rows, Mixed, SHARED, SEGMENTS, or a list of them for an operation with several results."""


class NotProvedError(Exception):
    """Raised by a rule that finds rows mixed; the pass turns it into `Mixed`."""


@dataclass(frozen=True, slots=True)
class PaddingReport:
    """The outcome of the analysis."""

    reasons: tuple[tuple[str, str], ...]
    """(node, reason) for every node that mixed rows itself; empty when padding is proved."""
    may_probe: bool = True
    """Whether a padded run is safe to try; False when pad rows may look up out of range or hold garbage."""

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
    analysis = _Analysis(dict(seeds), token_symbol, accepts)
    if len(analysis.samples) < 2:
        return PaddingReport((("graph", f"the trace holds for {analysis.samples} tokens only"),))
    reasons = [*analysis.check_seeds(), *analysis.visit_all(nodes)]
    return PaddingReport(tuple(reasons), analysis.may_probe)


def token_dim(value: torch.Tensor, token_symbol: str) -> int | None:
    """The first dimension whose size depends on the token symbol."""
    return next((dim for dim, expr in enumerate(shape_exprs(value)) if token_symbol in _symbols(expr)), None)


def _symbols(expr: sympy.Expr) -> set[str]:
    return {str(s) for s in expr.free_symbols}


def _sample(accepts: Callable[[int], bool]) -> list[int]:
    """Token counts that the trace holds for, at which sizes are compared."""
    samples = [n for n in range(2, 4097) if accepts(n)]
    if len(samples) < 2:
        samples = list(itertools.islice((n for n in range(2, 2**18) if accepts(n)), 2))
    return samples


class _Analysis:
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
                self.padded_symbols.update(s for e in shape_exprs(node.meta["val"]) for s in _symbols(e))

    def check_seeds(self) -> Iterable[tuple[str, str]]:
        for node in self.seeds:
            if self.states[node] is SEGMENTS:
                continue
            try:
                self.check_extents(node.meta["val"], self.states[node])
            except NotProvedError as error:
                self.states[node] = Mixed(str(error))
                yield node.name, str(error)

    def visit_all(self, nodes: Sequence[fx.Node]) -> Iterable[tuple[str, str]]:
        for node in nodes:
            inputs = [self.states[n] for n in node.all_input_nodes if n in self.states]
            if _operation(node) in _LOOKUPS and not self.looks_up_safely(node):
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
        name = _operation(node)
        if name == "getitem":
            source, index = node.args
            state = self.states[source]  # type: ignore[index]
            return state[index] if isinstance(state, list) else state  # type: ignore[index]
        if name not in _DENSE and _draws_random_numbers(node):
            raise NotProvedError(f"{name} draws random numbers, whose order depends on the token count")
        if SEGMENTS in inputs and name not in _ATTENTIONS:
            raise NotProvedError(f"{name} reads the segments' cumulative lengths; only attention may")
        if name not in _SIZED and self.reads_token_count(node):
            raise NotProvedError(f"{name} computes with the token count or the number of segments")
        if not any(isinstance(s, Rows | list) for s in inputs) and name not in _CONSTRUCTORS:
            return SHARED
        rule = _RULES.get(name) or (_pointwise if _is_pointwise(node) else None)
        if rule is None:
            raise NotProvedError(f"no padding rule for {name}")
        return rule(_View(self, node))

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
            symbols = _symbols(expr)
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
        if _symbols(one) | _symbols(other) != {self.symbol}:
            return False
        a, b = Size(one), Size(other)
        return all(a({self.symbol: n}) == b({self.symbol: n}) for n in self.samples)

    def looks_up_safely(self, node: fx.Node) -> bool:
        """Whether the indices of pad rows are in range: they are the zeros of an input's pad rows, not
        computed.
        """
        indices = [i for i in _indices(node) if isinstance(i, fx.Node)]
        return all(self._is_an_input(index) for index in indices)

    def _is_an_input(self, node: fx.Node) -> bool:
        while node not in self.seeds and self.states.get(node, SHARED) is not SHARED:
            if _operation(node) not in _MOVERS:
                return False
            node = node.all_input_nodes[0]
        return True


class _View:
    """A node as the rules see it: arguments by position, states, shapes."""

    def __init__(self, analysis: _Analysis, node: fx.Node) -> None:
        self.analysis = analysis
        self.node = node
        self.args = _positional(node)
        self.name = _operation(node)

    def arg(self, position: int, default: Any = None) -> Any:
        value = self.args[position] if position < len(self.args) else None
        return default if value is None else value

    def state(self, argument: Any) -> State:
        return self.analysis.states.get(argument, SHARED) if isinstance(argument, fx.Node) else SHARED

    def rows(self, position: int = 0) -> int:
        """The token dimension of an argument, which must have one."""
        state = self.state(self.arg(position))
        if not isinstance(state, Rows):
            raise NotProvedError(f"{self.name} takes rows where none were expected (argument {position})")
        return state.dim

    def rank(self, position: int = 0) -> int:
        return self.tensor(position).dim()

    def tensor(self, position: int = 0) -> torch.Tensor:
        value = self.arg(position).meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    def dim(self, value: Any, position: int = 0) -> int:
        return int(value) % self.rank(position)

    def output(self) -> torch.Tensor:
        value = self.node.meta["val"]
        tensor = value[0] if isinstance(value, list | tuple) else value
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def require_shared(self, *positions: int) -> None:
        for position in positions:
            argument = self.arg(position)
            if argument is not None and self.state(argument) is not SHARED:
                raise NotProvedError(f"argument {position} of {self.name} depends on the tokens")

    def require_safe_lookup(self) -> None:
        if not self.analysis.looks_up_safely(self.node):
            raise self.fail("looks up computed indices, which may be out of range in pad rows")

    def fail(self, why: str) -> NotProvedError:
        return NotProvedError(f"{self.name} {why}")


# --- rules
# -----------------------------------------------------------------------------------------------------------


def _pointwise(view: _View) -> State:
    output = view.output()
    dims = set()
    for node in view.node.all_input_nodes:
        state, value = view.analysis.states.get(node, SHARED), node.meta.get("val")
        if isinstance(state, Rows) and isinstance(value, torch.Tensor):
            dim = state.dim + output.dim() - value.dim()
            if not view.analysis.are_equal(expression(value.shape[state.dim]), expression(output.shape[dim])):
                raise view.fail("broadcasts along the token dimension")
            dims.add(dim)
    if len(dims) != 1:
        raise view.fail(f"combines tensors whose token dimensions differ: {sorted(dims)}")
    return Rows(dims.pop())


def _reshape(view: _View) -> State:
    dim = view.rows()
    before, after = shape_exprs(view.tensor()), shape_exprs(view.output())
    leading = sympy.prod(before[:dim])
    for candidate in range(len(after)):
        tokens = view.analysis.symbol in _symbols(after[candidate])
        if tokens and sympy.simplify(sympy.prod(after[:candidate]) - leading) == 0:
            return Rows(candidate)
    raise view.fail(f"from {tuple(before)} to {tuple(after)} joins tokens with an outer dimension")


def _permute(view: _View) -> State:
    order = [view.dim(d) for d in view.arg(1)]
    return Rows(order.index(view.rows()))


def _transpose(view: _View) -> State:
    first, second = (0, 1) if view.name == "t" else (view.dim(view.arg(1)), view.dim(view.arg(2)))
    dim = view.rows()
    return Rows({first: second, second: first}.get(dim, dim)) if view.rank() > 1 else Rows(dim)


def _unsqueeze(view: _View) -> State:
    at = int(view.arg(1)) % (view.rank() + 1)
    dim = view.rows()
    return Rows(dim + 1 if at <= dim else dim)


def _squeeze(view: _View) -> State:
    dims = view.arg(1)
    listed = range(view.rank()) if dims is None else [dims] if isinstance(dims, int) else dims
    sizes = shape_exprs(view.tensor())
    gone = {view.dim(d) for d in listed if sizes[view.dim(d)] == 1}
    dim = view.rows()
    return Rows(dim - sum(1 for d in gone if d < dim))


def _expand(view: _View) -> State:
    return Rows(view.rows() + view.output().dim() - view.rank())


def _same(view: _View) -> State:
    return Rows(view.rows())


def _slice(view: _View) -> State:
    dim, rows = view.dim(view.arg(1, 0)), view.rows()
    if dim == rows:
        start, end, step = view.arg(2) or 0, view.arg(3), view.arg(4, 1)
        whole = start == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= 2**62))
        if not whole:
            raise view.fail("cuts the token dimension")
    return Rows(rows)


def _select(view: _View) -> State:
    dim, rows = view.dim(view.arg(1)), view.rows()
    if dim == rows:
        raise view.fail("takes one token")
    return Rows(rows - 1 if dim < rows else rows)


def _split(view: _View) -> State:
    dim, rows = view.dim(view.arg(2, 0)), view.rows()
    if dim == rows:
        raise view.fail("cuts the token dimension")
    return [Rows(rows)] * len(view.node.meta["val"])


def _unbind(view: _View) -> State:
    dim, rows = view.dim(view.arg(1, 0)), view.rows()
    if dim == rows:
        raise view.fail("takes tokens apart")
    return [Rows(rows - 1 if dim < rows else rows)] * len(view.node.meta["val"])


def _cat(view: _View) -> State:
    tensors = view.arg(0)
    states = [view.state(t) for t in tensors]
    dims = {s.dim for s in states if isinstance(s, Rows)}
    if len(dims) != 1:
        raise view.fail("joins tensors whose token dimensions differ")
    rows = dims.pop()
    rank = view.output().dim() - (1 if view.name == "stack" else 0)
    dim = int(view.arg(1, 0)) % (rank + (1 if view.name == "stack" else 0))
    if view.name == "stack":
        return Rows(rows + 1 if dim <= rows else rows)
    if dim == rows:
        raise view.fail("appends along the token dimension")
    return Rows(rows)


def _linear(view: _View) -> State:
    """mm(x, w), linear(x, w, b): rows of x, shared weights; the contracted dimension is the last."""
    view.require_shared(1, 2)
    if view.rows() == view.rank() - 1:
        raise view.fail("contracts the token dimension")
    return Rows(view.rows())


def _addmm(view: _View) -> State:
    view.require_shared(0, 2)
    if view.rows(1) != 0:
        raise view.fail("contracts the token dimension")
    return Rows(0)


def _batched_matmul(view: _View) -> State:
    """bmm(a, b): tokens as the batch of both, or as the rows of a with b shared."""
    first = 1 if view.name == "baddbmm" else 0
    a, b = view.state(view.arg(first)), view.state(view.arg(first + 1))
    if view.name == "baddbmm" and view.state(view.arg(0)) not in (SHARED, Rows(0)):
        raise view.fail("adds a tensor whose rows are not its batch")
    if (a == Rows(0) and b in (Rows(0), SHARED)) or (a is SHARED and b == Rows(0)):
        return Rows(0)
    if a == Rows(1) and b is SHARED:
        return Rows(1)
    raise view.fail("multiplies along the token dimension")


def _batched(view: _View) -> State:
    """Operations that treat every entry of dimension 0 alone: convolution, pooling, interpolation."""
    view.require_shared(*range(1, len(view.args)))
    if view.rows() != 0:
        raise view.fail("works along the token dimension")
    outputs = view.node.meta["val"]
    return [Rows(0)] * len(outputs) if isinstance(outputs, list | tuple) else Rows(0)


def _normalise_trailing(view: _View) -> State:
    """layer_norm, rms_norm: (input, normalized_shape, weight, bias, eps)."""
    view.require_shared(2, 3)
    if view.rows() >= view.rank() - len(view.arg(1)):
        raise view.fail("normalises over tokens")
    outputs = view.node.meta["val"]
    return [Rows(view.rows())] * len(outputs) if isinstance(outputs, list | tuple) else Rows(view.rows())


def _along_dim(view: _View) -> State:
    """softmax, cumsum: (input, dim)."""
    if view.dim(view.arg(1)) == view.rows():
        raise view.fail("runs along the token dimension")
    return Rows(view.rows())


def _reduce(view: _View) -> State:
    """sum, mean, amax, var...: (input, dims, keepdim); a norm has its order before the dims."""
    dims = view.arg(2 if view.name == "linalg_vector_norm" else 1)
    listed = (
        list(range(view.rank()))
        if dims is None or dims == []
        else dims
        if isinstance(dims, list | tuple)
        else [dims]
    )
    reduced = {view.dim(d) for d in listed}
    rows = view.rows()
    if rows in reduced:
        raise view.fail("reduces over tokens")
    kept = view.output().dim() == view.rank()
    state = Rows(rows if kept else rows - sum(1 for d in reduced if d < rows))
    outputs = view.node.meta["val"]
    return [state] * len(outputs) if isinstance(outputs, list | tuple) else state


def _embedding(view: _View) -> State:
    view.require_shared(0)
    view.require_safe_lookup()
    return Rows(view.rows(1))


def _index(view: _View) -> State:
    """table[indices]: a shared table looked up by rows; indices into rows would let tokens read one
    another.
    """
    view.require_shared(0)
    indices = view.arg(1)
    given = [i for i in indices if i is not None]
    if indices[0] is None or any(not isinstance(view.state(i), Rows) for i in given):
        raise view.fail("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    rank = max(i.meta["val"].dim() for i in given)
    dims = {view.state(i).dim + rank - i.meta["val"].dim() for i in given}
    if len(dims) != 1 or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in given):
        raise view.fail("gathers with a pattern that is not one lookup a row")
    return Rows(dims.pop())


def _index_select(view: _View) -> State:
    view.require_shared(0)
    if view.dim(view.arg(1)) != 0:
        raise view.fail("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    return Rows(view.rows(2))


def _pad(view: _View) -> State:
    rows, padding = view.rows(), list(view.arg(1))
    index = 2 * (view.rank() - 1 - rows)
    if index < len(padding) and (padding[index], padding[index + 1]) != (0, 0):
        raise view.fail("pads the token dimension")
    return Rows(rows)


def _constructor(view: _View) -> State:
    """arange, zeros, full...: a longer one begins with the shorter one."""
    dim = token_dim(view.output(), view.analysis.symbol)
    fill = {"full": 1, "new_full": 2, "scalar_tensor": 0}.get(view.name)
    if fill is not None and isinstance(view.arg(fill), fx.Node):
        raise view.fail("fills with a computed value")
    if view.name == "arange":
        start, step = (0, 1) if len(view.node.args) == 1 else (view.arg(0), view.arg(2, 1))
        if dim is None and view.analysis.reads_token_count(view.node):
            raise view.fail("makes values from the token count")
        if dim is not None and (isinstance(start, fx.Node) or start != 0):
            raise view.fail("counts from a start that is not 0")
        if dim is not None and isinstance(step, fx.Node):
            raise view.fail("counts in computed steps")
    return SHARED if dim is None else Rows(dim)


def _varlen_attention(view: _View) -> State:
    if [view.state(view.arg(i)) for i in range(3)] != [Rows(0)] * 3:
        raise view.fail("takes query, key and value whose tokens are not their first dimension")
    if view.state(view.arg(3)) is not SEGMENTS:
        raise view.fail("takes cumulative lengths that do not enter the graph as they are")
    tokens = shape_exprs(view.tensor())[0]
    if str(tokens) != view.analysis.symbol:
        # Pad rows belong to no segment, and masks keep only the tokens' finite.
        view.analysis.may_probe = False
        raise view.fail(f"runs over {tokens} rows, which is not the token count {view.analysis.symbol}")
    if isinstance(view.arg(5), fx.Node):
        raise view.fail("takes a computed scale")
    return Rows(0)


def _dense_attention(view: _View) -> State:
    """(batch, heads, tokens, head_dim): every entry of the batch attends alone."""
    if _named(view.node, "dropout_p"):
        raise view.fail("drops entries at random")
    qkv, others = view.args[:3], [*view.args[3:], *view.node.kwargs.values()]
    masks = [a for a in others if isinstance(a, fx.Node)]
    independent = all(view.state(a) == Rows(0) and view.rank(i) > 2 for i, a in enumerate(qkv))
    for mask in masks:
        aligned = view.state(mask) == Rows(0) and mask.meta["val"].dim() == view.rank()
        independent = independent and (aligned or view.state(mask) is SHARED)
    if not independent:
        raise view.fail("attends across the dimension that counts tokens")
    outputs = view.node.meta["val"]
    return [Rows(0)] * len(outputs) if isinstance(outputs, list | tuple) else Rows(0)


_DENSE = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_ATTENTIONS = frozenset(("varlen_attention", *_DENSE))
_CONSTRUCTORS = frozenset(
    (
        "arange",
        "zeros",
        "ones",
        "full",
        "empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "scalar_tensor",
    )
)
_RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")
# These take sizes, which may follow the token count: their rules and the sizes of their results are what
# decides.
_SIZED = frozenset((*_CONSTRUCTORS, *_RESHAPES, "expand", "native_group_norm", "varlen_attention"))
# These look something up by index, and these only move values about or repeat them.
_LOOKUPS = frozenset(
    ("embedding", "index", "index_select", "gather", "take", "index_put", "index_add", "scatter")
)
_VIEWS = ("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "slice", "select")
_PARTS = ("split", "split_with_sizes", "unbind", "getitem", "cat", "stack", "clone", "_to_copy")
_MOVERS = frozenset((*_RESHAPES, *_VIEWS, *_PARTS))


def _table() -> dict[str, Callable[[_View], State]]:
    groups: list[tuple[Callable[[_View], State], Sequence[str]]] = [
        (_reshape, _RESHAPES),
        (_permute, ("permute",)),
        (_transpose, ("transpose", "t")),
        (_unsqueeze, ("unsqueeze",)),
        (_squeeze, ("squeeze",)),
        (_expand, ("expand",)),
        (
            _same,
            ("alias", "clone", "contiguous", "detach", "_to_copy", "to", "lift_fresh_copy", "zeros_like"),
        ),
        (_same, ("ones_like", "empty_like", "full_like", "view_as_real", "view_as_complex")),
        (_slice, ("slice",)),
        (_select, ("select",)),
        (_split, ("split", "split_with_sizes", "chunk")),
        (_unbind, ("unbind",)),
        (_cat, ("cat", "stack")),
        (_linear, ("mm", "matmul", "linear")),
        (_addmm, ("addmm",)),
        (_batched_matmul, ("bmm", "baddbmm")),
        (_batched, ("convolution", "conv1d", "conv2d", "conv3d", "avg_pool2d", "max_pool2d_with_indices")),
        (
            _batched,
            ("_adaptive_avg_pool2d", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d"),
        ),
        (_batched, ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "native_group_norm")),
        (_normalise_trailing, ("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")),
        (_along_dim, ("_softmax", "_log_softmax", "softmax", "cumsum", "cumprod")),
        (
            _reduce,
            (
                "sum",
                "mean",
                "amax",
                "amin",
                "argmax",
                "argmin",
                "var",
                "std",
                "var_mean",
                "prod",
                "any",
                "all",
            ),
        ),
        (_reduce, ("linalg_vector_norm",)),
        (_embedding, ("embedding",)),
        (_index, ("index",)),
        (_index_select, ("index_select",)),
        (_pad, ("constant_pad_nd",)),
        (_constructor, tuple(_CONSTRUCTORS)),
        (_varlen_attention, ("varlen_attention",)),
        (_dense_attention, _DENSE),
    ]
    return {name: rule for rule, names in groups for name in names}


_RULES = _table()


def _operation(node: fx.Node) -> str:
    """The name that rules go by: that of the ATen operation, qualified for operations of other libraries."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", str(target))
    name: str = target.overloadpacket.__name__
    known = target.namespace == "aten" or (target.namespace == "fxsplit" and name == "varlen_attention")
    return name if known else f"{target.namespace}::{name}"


def _positional(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments by position, those given by name or left at their default included."""
    args = list(node.args)
    if isinstance(node.target, torch._ops.OpOverload):
        for parameter in node.target._schema.arguments[len(args) :]:
            if parameter.kwarg_only:
                break
            args.append(node.kwargs.get(parameter.name, parameter.default_value))
    return tuple(args)


def _named(node: fx.Node, name: str) -> Any:
    """The argument of a schema's parameter; None if there is none."""
    for parameter, value in zip(node.target._schema.arguments, _positional(node), strict=False):  # type: ignore[union-attr]
        if parameter.name == name:
            return value
    return node.kwargs.get(name)


def _indices(node: fx.Node) -> Sequence[Any]:
    """The indices of a lookup: all its arguments after the first, or for an embedding, too."""
    return [i for a in node.args[1:] for i in (a if isinstance(a, list | tuple) else [a])]


def _draws_random_numbers(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
