"""Which pieces may be padded: a proof that their rows are independent along the token dimension.

Every tensor of the region is given a state by one pass over its ATen nodes:

* `Rows(dim)`: entry j along `dim` is computed from the tokens of group j alone (a group is one token, or the few that a
  spatial merge joins). Tokens appended at the end therefore append entries and change none before them.
* `SHARED`: the same whatever the tokens are (weights, tables, scalars).
* `SEGMENTS`: cumulative lengths, which only attention may read; the capture extends them over the pad rows.
* `Mixed(reason)`: anything else; rows may depend on one another, or no rule is known.

A region without `Mixed` may be padded: its real rows equal those of the unpadded run. Rules are by operation; pointwise
operations are recognised by their tag, so most need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from fxsplit_encoder.compile.sizes import expression, shape_exprs

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

    @property
    def proved(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "proved" if self.proved else "; ".join(f"{node}: {reason}" for node, reason in self.reasons[:3])


def analyse(nodes: Sequence[fx.Node], seeds: Mapping[fx.Node, State], token_symbol: str) -> PaddingReport:
    """Proves or refutes row independence of a region.

    Args:
        nodes: the region's nodes in order, each with its traced value in `meta["val"]`.
        seeds: the states of the tensors that enter the region.
        token_symbol: the name of the symbol that counts tokens.
    """
    analysis = _Analysis(dict(seeds), token_symbol)
    return PaddingReport(tuple(analysis.visit_all(nodes)))


def token_dim(value: torch.Tensor, token_symbol: str) -> int | None:
    """The first dimension whose size depends on the token symbol."""
    for dim, expr in enumerate(shape_exprs(value)):
        if any(str(s) == token_symbol for s in expr.free_symbols):
            return dim
    return None


class _Analysis:
    def __init__(self, states: dict[fx.Node, State], token_symbol: str) -> None:
        self.states = states
        self.symbol = token_symbol

    def visit_all(self, nodes: Sequence[fx.Node]) -> Iterable[tuple[str, str]]:
        for node in nodes:
            inputs = [self.states[n] for n in node.all_input_nodes if n in self.states]
            inherited = next((s for s in inputs if isinstance(s, Mixed)), None)
            if inherited is not None:
                self.states[node] = inherited
                continue
            try:
                self.states[node] = self.state_of(node, inputs)
            except NotProvedError as error:
                self.states[node] = Mixed(str(error))
                yield node.name, str(error)

    def state_of(self, node: fx.Node, inputs: Sequence[State]) -> State:
        name = _operation(node)
        if name == "getitem":
            state = self.states[node.args[0]]  # type: ignore[index]
            return state[node.args[1]] if isinstance(state, list) else state
        rule = _RULES.get(name)
        if rule is None and _is_pointwise(node):
            rule = _pointwise
        if SEGMENTS in inputs and name not in _ATTENTIONS:
            raise NotProvedError(f"{name} reads the segments' cumulative lengths; only attention may")
        if not any(isinstance(s, Rows | list) for s in inputs) and name not in _CONSTRUCTORS:
            if self._reads_token_count(node):
                raise NotProvedError(f"{name} makes values from the token count")
            return SHARED
        if rule is None:
            raise NotProvedError(f"no padding rule for {name}")
        return rule(_View(self, node))

    def _reads_token_count(self, node: fx.Node) -> bool:
        values = (n.meta.get("val") for n in node.all_input_nodes)
        return any(
            any(str(s) == self.symbol for s in expression(v).free_symbols)
            for v in values
            if isinstance(v, torch.SymInt)
        )


class _View:
    """A node as the rules see it: arguments by position, states, shapes."""

    def __init__(self, analysis: _Analysis, node: fx.Node) -> None:
        self.analysis = analysis
        self.node = node
        self.args = node.args
        self.name = _operation(node)

    def arg(self, position: int, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else default

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

    def fail(self, why: str) -> NotProvedError:
        return NotProvedError(f"{self.name} {why}")


# --- rules -----------------------------------------------------------------------------------------------------------


def _pointwise(view: _View) -> State:
    output = view.output()
    if view.analysis._reads_token_count(view.node):
        raise view.fail("computes with the token count")
    dims = set()
    for node in view.node.all_input_nodes:
        state, value = view.analysis.states.get(node, SHARED), node.meta.get("val")
        if isinstance(state, Rows) and isinstance(value, torch.Tensor):
            dim = state.dim + output.dim() - value.dim()
            if expression(value.shape[state.dim]) != expression(output.shape[dim]):
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
        tokens = [str(s) == view.analysis.symbol for s in after[candidate].free_symbols]
        if any(tokens) and sympy.simplify(sympy.prod(after[:candidate]) - leading) == 0:
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
    """sum, mean, amax, var...: (input, dims, keepdim)."""
    dims = view.arg(1)
    listed = list(range(view.rank())) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
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
    return Rows(view.rows(1))


def _index(view: _View) -> State:
    """table[indices]: a shared table looked up by rows; indices into rows would let tokens read one another."""
    view.require_shared(0)
    indices = view.arg(1)
    rows = [view.state(i) for i in indices if i is not None]
    if indices[0] is None or any(not isinstance(s, Rows) for s in rows) or len(set(rows)) != 1:
        raise view.fail("gathers with a pattern that is not one lookup a row")
    return rows[0]


def _index_select(view: _View) -> State:
    view.require_shared(0)
    if view.dim(view.arg(1)) != 0:
        raise view.fail("gathers with a pattern that is not one lookup a row")
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
    if dim is None:
        if view.analysis._reads_token_count(view.node):
            raise view.fail("makes values from the token count")
        return SHARED
    if view.name == "arange" and len(view.args) > 1 and view.arg(0) != 0:
        raise view.fail("counts from a start that is not 0")
    if view.name in ("full", "new_full") and isinstance(view.args[-1], fx.Node):
        raise view.fail("fills with a computed value")
    return Rows(dim)


def _varlen_attention(view: _View) -> State:
    if [view.state(view.arg(i)) for i in range(3)] != [Rows(0)] * 3:
        raise view.fail("takes query, key and value whose tokens are not their first dimension")
    if view.state(view.arg(3)) is not SEGMENTS:
        raise view.fail("takes cumulative lengths that do not enter the graph as they are")
    return Rows(0)


def _dense_attention(view: _View) -> State:
    """(batch, heads, tokens, head_dim): every entry of the batch attends alone."""
    states = [view.state(a) for a in view.args[:3]]
    mask = [view.state(n) for n in view.node.all_input_nodes[3:]]
    if states != [Rows(0)] * 3 or any(s not in (SHARED, Rows(0)) for s in mask):
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
    ("arange", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
)


def _table() -> dict[str, Callable[[_View], State]]:
    groups: list[tuple[Callable[[_View], State], Sequence[str]]] = [
        (_reshape, ("view", "_unsafe_view", "reshape", "flatten", "unflatten")),
        (_permute, ("permute",)),
        (_transpose, ("transpose", "t", "numpy_T")),
        (_unsqueeze, ("unsqueeze",)),
        (_squeeze, ("squeeze",)),
        (_expand, ("expand",)),
        (_same, ("alias", "clone", "contiguous", "detach", "_to_copy", "to", "lift_fresh_copy", "zeros_like")),
        (_same, ("ones_like", "empty_like", "full_like")),
        (_slice, ("slice",)),
        (_select, ("select",)),
        (_split, ("split", "split_with_sizes", "chunk")),
        (_unbind, ("unbind",)),
        (_cat, ("cat", "stack")),
        (_linear, ("mm", "matmul", "linear")),
        (_addmm, ("addmm",)),
        (_batched_matmul, ("bmm", "baddbmm")),
        (_batched, ("convolution", "conv1d", "conv2d", "conv3d", "avg_pool2d", "max_pool2d_with_indices")),
        (_batched, ("_adaptive_avg_pool2d", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d")),
        (_batched, ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "native_group_norm")),
        (_normalise_trailing, ("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")),
        (_along_dim, ("_softmax", "_log_softmax", "softmax", "cumsum", "cumprod")),
        (_reduce, ("sum", "mean", "amax", "amin", "argmax", "argmin", "var", "std", "var_mean", "prod", "any", "all")),
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
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else getattr(
        target, "__name__", str(target)
    )


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


