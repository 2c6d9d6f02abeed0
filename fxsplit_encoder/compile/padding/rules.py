"""The rules, one an operation: which dimension of its result is independent, given those of its arguments.

Pointwise operations are recognised by their tag and share one rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy
import torch
from torch import fx

from fxsplit_encoder.compile.padding.states import (
    SEGMENTS,
    SHARED,
    NodeView,
    Rows,
    State,
    named,
    symbols_of,
    token_dim,
)
from fxsplit_encoder.compile.sizes import expression, shape_exprs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def pointwise(view: NodeView) -> State:
    """All arguments with rows have them along one dimension, and none is broadcast along it."""
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


def _reshape(view: NodeView) -> State:
    dim = view.rows()
    before, after = shape_exprs(view.tensor()), shape_exprs(view.output())
    leading = sympy.prod(before[:dim])
    for candidate in range(len(after)):
        tokens = view.analysis.symbol in symbols_of(after[candidate])
        if tokens and sympy.simplify(sympy.prod(after[:candidate]) - leading) == 0:
            return Rows(candidate)
    raise view.fail(f"from {tuple(before)} to {tuple(after)} joins tokens with an outer dimension")


def _permute(view: NodeView) -> State:
    order = [view.dim(d) for d in view.arg(1)]
    return Rows(order.index(view.rows()))


def _transpose(view: NodeView) -> State:
    first, second = (0, 1) if view.name == "t" else (view.dim(view.arg(1)), view.dim(view.arg(2)))
    dim = view.rows()
    return Rows({first: second, second: first}.get(dim, dim)) if view.rank() > 1 else Rows(dim)


def _unsqueeze(view: NodeView) -> State:
    at = int(view.arg(1)) % (view.rank() + 1)
    dim = view.rows()
    return Rows(dim + 1 if at <= dim else dim)


def _squeeze(view: NodeView) -> State:
    dims = view.arg(1)
    listed = range(view.rank()) if dims is None else [dims] if isinstance(dims, int) else dims
    sizes = shape_exprs(view.tensor())
    gone = {view.dim(d) for d in listed if sizes[view.dim(d)] == 1}
    dim = view.rows()
    return Rows(dim - sum(1 for d in gone if d < dim))


def _expand(view: NodeView) -> State:
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    return Rows(view.rows() + view.output().dim() - view.rank())


def _repeat(view: NodeView) -> State:
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    counts = view.arg(1)
    dim = view.rows() + len(counts) - view.rank()
    if counts[dim] != 1:
        raise view.fail("repeats the token dimension")
    return Rows(dim)


def _copies(view: NodeView) -> State:
    """What the tokens do not change, once a token (a class token) or once in all: more copies begin with
    fewer.
    """
    varying = [dim for dim, size in enumerate(shape_exprs(view.output())) if view.analysis.varies(size)]
    return Rows(varying[0]) if varying else SHARED


def _same(view: NodeView) -> State:
    return Rows(view.rows())


def _slice(view: NodeView) -> State:
    dim, rows = view.dim(view.arg(1, 0)), view.rows()
    if dim == rows:
        start, end, step = view.arg(2) or 0, view.arg(3), view.arg(4, 1)
        whole = start == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= 2**62))
        if not whole:
            raise view.fail("cuts the token dimension")
    return Rows(rows)


def _select(view: NodeView) -> State:
    dim, rows = view.dim(view.arg(1)), view.rows()
    if dim == rows:
        raise view.fail("takes one token")
    return Rows(rows - 1 if dim < rows else rows)


def _split(view: NodeView) -> State:
    dim, rows = view.dim(view.arg(2, 0)), view.rows()
    if dim == rows:
        raise view.fail("cuts the token dimension")
    return [Rows(rows)] * len(view.node.meta["val"])


def _unbind(view: NodeView) -> State:
    dim, rows = view.dim(view.arg(1, 0)), view.rows()
    if dim == rows:
        raise view.fail("takes tokens apart")
    return [Rows(rows - 1 if dim < rows else rows)] * len(view.node.meta["val"])


def _cat(view: NodeView) -> State:
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


def _linear(view: NodeView) -> State:
    """mm(x, w), linear(x, w, b): rows of x, shared weights; the contracted dimension is the last."""
    view.require_shared(1, 2)
    if view.rows() == view.rank() - 1:
        raise view.fail("contracts the token dimension")
    return Rows(view.rows())


def _addmm(view: NodeView) -> State:
    view.require_shared(0, 2)
    if view.rows(1) != 0:
        raise view.fail("contracts the token dimension")
    return Rows(0)


def _linear_fp8(view: NodeView) -> State:
    """linear_fp8(rows, row_scales, weight, weight_scales, bias): rows with a scale each, shared weights."""
    view.require_shared(2, 3, 4)
    if view.rows(0) != 0 or view.rows(1) != 0:
        raise view.fail("contracts the token dimension")
    return Rows(0)


def _quantise_rows(view: NodeView) -> State:
    """One scale for the last dimension."""
    if view.rows() == view.rank() - 1:
        raise view.fail("scales tokens together")
    return [Rows(view.rows())] * 2


def _batched_matmul(view: NodeView) -> State:
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


def _batched(view: NodeView) -> State:
    """Operations that treat every entry of dimension 0 alone: convolution, pooling, interpolation."""
    view.require_shared(*range(1, len(view.args)))
    if view.rows() != 0:
        raise view.fail("works along the token dimension")
    outputs = view.node.meta["val"]
    return [Rows(0)] * len(outputs) if isinstance(outputs, list | tuple) else Rows(0)


def _normalise_trailing(view: NodeView) -> State:
    """layer_norm, rms_norm: (input, normalized_shape, weight, bias, eps)."""
    view.require_shared(2, 3)
    if view.rows() >= view.rank() - len(view.arg(1)):
        raise view.fail("normalises over tokens")
    outputs = view.node.meta["val"]
    return [Rows(view.rows())] * len(outputs) if isinstance(outputs, list | tuple) else Rows(view.rows())


def _along_dim(view: NodeView) -> State:
    """softmax, cumsum: (input, dim)."""
    if view.dim(view.arg(1)) == view.rows():
        raise view.fail("runs along the token dimension")
    return Rows(view.rows())


def _flip(view: NodeView) -> State:
    """flip: (input, dims)."""
    if view.rows() in {view.dim(d) for d in view.arg(1)}:
        raise view.fail("reverses the tokens")
    return Rows(view.rows())


def _reduce(view: NodeView) -> State:
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


def _embedding(view: NodeView) -> State:
    view.require_shared(0)
    view.require_safe_lookup()
    return Rows(view.rows(1))


def _index(view: NodeView) -> State:
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


def _index_select(view: NodeView) -> State:
    view.require_shared(0)
    if view.dim(view.arg(1)) != 0:
        raise view.fail("gathers with a pattern that is not one lookup a row")
    view.require_safe_lookup()
    return Rows(view.rows(2))


def _permute_rows(view: NodeView) -> State:
    """The op promises that the entries of real rows are real rows; it holds for an order that comes from
    outside as it is, since padding only appends to such a one.
    """
    if view.rows(0) != 0 or view.rows(1) != 0 or view.arg(1) not in view.analysis.seeds:
        raise view.fail("takes an order of rows that does not enter the graph as it is")
    return Rows(0)


def _pad(view: NodeView) -> State:
    rows, padding = view.rows(), list(view.arg(1))
    index = 2 * (view.rank() - 1 - rows)
    if index < len(padding) and (padding[index], padding[index + 1]) != (0, 0):
        raise view.fail("pads the token dimension")
    return Rows(rows)


def _constructor(view: NodeView) -> State:
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


def _varlen_attention(view: NodeView) -> State:
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


def _dense_attention(view: NodeView) -> State:
    """(batch, heads, tokens, head_dim): every entry of the batch attends alone."""
    if named(view.node, "dropout_p"):
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


DENSE_ATTENTIONS = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
ATTENTIONS = frozenset(("varlen_attention", *DENSE_ATTENTIONS))
CONSTRUCTORS = frozenset(
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
# These make rows out of what has none.
COPIES = frozenset(("expand", "repeat"))
_RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")
# These take sizes, which may follow the token count: their rules and the sizes of their results are what
# decides.
SIZED = frozenset((*CONSTRUCTORS, *COPIES, *_RESHAPES, "native_group_norm", "varlen_attention"))
# These look something up by index, and these only move values about or repeat them.
_PERMUTE = "fxsplit::permute_rows"
_SCATTERS = ("index_put", "index_add", "scatter")
LOOKUPS = frozenset(("embedding", "index", "index_select", "gather", "take", _PERMUTE, *_SCATTERS))
_VIEWS = ("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "slice", "select")
_PARTS = ("split", "split_with_sizes", "unbind", "getitem", "cat", "stack", "clone", "_to_copy")
MOVERS = frozenset((*_RESHAPES, *_VIEWS, *_PARTS))


def _table() -> dict[str, Callable[[NodeView], State]]:
    groups: list[tuple[Callable[[NodeView], State], Sequence[str]]] = [
        (_reshape, _RESHAPES),
        (_permute, ("permute",)),
        (_transpose, ("transpose", "t")),
        (_unsqueeze, ("unsqueeze",)),
        (_squeeze, ("squeeze",)),
        (_expand, ("expand",)),
        (_repeat, ("repeat",)),
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
        (_addmm, ("addmm", "fxsplit::addmm_gelu")),
        (_linear_fp8, ("fxsplit::linear_fp8",)),
        (_quantise_rows, ("fxsplit::quantise_rows",)),
        (_batched_matmul, ("bmm", "baddbmm")),
        (_batched, ("convolution", "conv1d", "conv2d", "conv3d", "avg_pool2d", "max_pool2d_with_indices")),
        (
            _batched,
            ("_adaptive_avg_pool2d", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d"),
        ),
        (_batched, ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "native_group_norm", "im2col")),
        (_normalise_trailing, ("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")),
        (_flip, ("flip",)),
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
        (_permute_rows, (_PERMUTE,)),
        (_pad, ("constant_pad_nd",)),
        (_constructor, tuple(CONSTRUCTORS)),
        (_varlen_attention, ("varlen_attention",)),
        (_dense_attention, DENSE_ATTENTIONS),
    ]
    return {name: rule for rule, names in groups for name in names}


RULES = _table()
