"""The padding rules of operations: which dimension of a result is independent, and why (the lemma)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import sympy
import torch
from torch import fx

from fxsplit_encoder._torch.dispatch import DENSE_ATTENTION_KERNELS
from fxsplit_encoder.compile.padding.states import (
    SEGMENTS,
    SHARED,
    Mixed,
    NodeView,
    Rows,
    Rule,
    State,
    operation,
    reads_token_count,
)
from fxsplit_encoder.compile.rewriting import arguments_of
from fxsplit_encoder.compile.sizes import expression, shape_exprs

COPIES = frozenset(("expand", "repeat"))
"""These make rows of shared values."""

_DIVISIONS = frozenset(("div", "divide", "floor_divide", "remainder", "fmod"))


_Entry = TypeVar("_Entry")


def _by_operation(table: Mapping[_Entry, str]) -> dict[str, _Entry]:
    pairs = [(operation, entry) for entry, operations in table.items() for operation in operations.split()]
    assert len(pairs) == len(dict(pairs)), "an operation has two entries"
    return dict(pairs)


def pointwise(view: NodeView) -> State:
    """The rule of operations that torch tags as pointwise. An entry of the result comes from one entry of
    each argument: the one at the same place, or at 0 of a broadcast dimension. So with rows along one
    dimension, not broadcast, in all arguments that have any, and the others shared, so has the result.
    """
    output = view.output()
    dims = set()
    for node in view.node.all_input_nodes:
        state, value = view.states.get(node, SHARED), node.meta.get("val")
        if isinstance(state, list):
            raise view.fail("takes several tensors as one argument")
        if isinstance(state, Rows) and isinstance(value, torch.Tensor):
            assert state.dim < value.dim(), node
            dim = state.dim + output.dim() - value.dim()
            if not view.sizes.are_equal(expression(value.shape[state.dim]), expression(output.shape[dim])):
                raise view.fail("broadcasts along the token dimension")
            dims.add(state.at(dim))
    if len(dims) != 1:
        raise view.fail(f"combines tensors whose token dimensions differ: {sorted(d.dim for d in dims)}")
    _require_safe_division(view)
    return view.each_result(dims.pop())


def _require_safe_division(view: NodeView) -> None:
    """Integers may be divided by what is not 0 only, and pad rows of integers are zeros: a CPU raises."""
    divisor = view.arg(1)
    if view.name not in _DIVISIONS or not isinstance(divisor, fx.Node):
        return
    value = divisor.meta["val"]
    by_rows = isinstance(view.state(divisor), Rows) and isinstance(value, torch.Tensor)
    if by_rows and not view.output().is_floating_point():
        raise view.fail("divides integers by those of the tokens, which may be 0 in pad rows")


def _same(view: NodeView) -> State:
    """The same entries in another dtype or memory, or constants of the same shape."""
    rows = view.rows_of()
    if view.name == "view_as_complex" and rows.dim == view.rank() - 1:
        raise view.fail("takes tokens for the parts of complex numbers")
    return rows


def _triangle(view: NodeView) -> State:
    """tril(x, diagonal): an entry is kept or zeroed by its place in the last two dimensions."""
    if view.rows() >= view.rank() - 2:
        raise view.fail("keeps entries by their place among the tokens")
    return Rows(view.rows())


def _expand(view: NodeView) -> State:
    """expand(x, sizes): entry (..., i, ...) is that of x at the same place, or at 0 where x has one. Rows
    stay where they were, counted from the last dimension; of what is shared, more copies begin with fewer.
    """
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    rows = view.rows_of()
    return rows.at(rows.dim + view.output().dim() - view.rank())


def _repeat(view: NodeView) -> State:
    """repeat(x, counts): entry i along a dimension of size c is that of x at i % c, so rows may be repeated
    along any dimension but their own; of what is shared, more copies begin with fewer.
    """
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    counts = view.arg(1)
    dim = view.rows() + len(counts) - view.rank()
    if counts[dim] != 1:
        raise view.fail("repeats the token dimension")
    return Rows(dim)


def _copies(view: NodeView) -> State:
    """Shared values, once for each token (a class token) or once."""
    dim = view.varying_dim()
    return SHARED if dim is None else Rows(dim)


DENSE_ATTENTIONS = (
    *("dense_attention", "scaled_dot_product_attention"),
    *(name.removeprefix("aten::") for name in DENSE_ATTENTION_KERNELS),
)
ATTENTIONS = frozenset(("varlen_attention", *DENSE_ATTENTIONS))


def _require_safe_lookup(view: NodeView) -> None:
    """Raises Mixed unless indices of pad rows are those of an input, zeros, which are in range."""
    indices = [i for a in view.node.args[1:] for i in (a if isinstance(a, list | tuple) else [a])]
    if not all(_is_an_input(view, index) for index in indices if isinstance(index, fx.Node)):
        raise view.fail("looks up computed indices, which may be out of range in pad rows")


def _is_an_input(view: NodeView, node: fx.Node) -> bool:
    if view.state(node) is SHARED:
        return True
    if node in view.seeds:
        return not node.meta["val"].is_floating_point()
    return operation(node) in MOVERS and all(_is_an_input(view, each) for each in node.all_input_nodes)


def _index(view: NodeView) -> State:
    """x[indices]: rows of indices into a shared table, each of which gives its own entries; or rows whose
    other dimensions are indexed by what is shared. Indices into rows would let tokens read one another.
    index_select(x, dim, i) is x[..., i] with one dimension for i, embedding(x, i) is x[i].
    """
    indices = view.arg(1)
    if view.name == "index_select":
        indices = [*[None] * view.dim(view.arg(1)), view.arg(2)]
    elif view.name == "embedding":
        indices = [view.arg(1)]
    given = [i for i in indices if i is not None]
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in given):
        raise view.fail("selects by a mask, so that the number of entries depends on data")
    if view.state(view.arg(0)) is not SHARED:
        return _entries_of_rows(view, indices, given)
    if indices[0] is None or any(not isinstance(view.state(i), Rows) for i in given):
        raise view.fail("gathers with a pattern that is not one lookup a row")
    _require_safe_lookup(view)
    rank = max(i.meta["val"].dim() for i in given)
    rows = {view.state(i).at(view.state(i).dim + rank - i.meta["val"].dim()) for i in given}
    if len(rows) != 1:
        raise view.fail("gathers with a pattern that is not one lookup a row")
    return rows.pop()


def _entries_of_rows(view: NodeView, indices: list[Any], given: list[Any]) -> State:
    """Rows whose other dimensions are indexed. Several indices become dimensions in the place of the first if
    they stand side by side, else the first dimensions.
    """
    rows = view.rows()
    if rows < len(indices) and indices[rows] is not None:
        raise view.fail("gathers tokens")
    if any(view.state(i) is not SHARED for i in given):
        raise view.fail("gathers entries of every row by indices of its own")
    places = [place for place, index in enumerate(indices) if index is not None]
    rank = max(view.name == "index_select", *(i.meta["val"].dim() for i in given))
    side_by_side = places == list(range(places[0], places[-1] + 1))
    before = sum(1 for place in places if place < rows)
    moved_in = rank if before or not side_by_side else 0
    return Rows(rows - before + moved_in)


def _permute_rows(view: NodeView) -> State:
    """permute_rows(rows, permutation): permutes the real rows among themselves, as the op promises of a
    permutation that enters the graph as it is: padding only appends to it.
    """
    if view.rows(0) != 0 or view.rows(1) != 0 or view.arg(1) not in view.seeds:
        raise view.fail("takes a permutation of rows that does not enter the graph as it is")
    return Rows(0)


def _varlen_attention(view: NodeView) -> State:
    """varlen_attention(query, key, value, cu_seqlens, max_seqlen, scale): a row attends to its segment. The
    segments of the unpadded run hold real rows only, and are followed by empty ones.
    """
    if [view.state(view.arg(i)) for i in range(3)] != [Rows(0)] * 3:
        raise view.fail("takes query, key and value whose tokens are not their first dimension")
    if view.state(view.arg(3)) is not SEGMENTS:
        raise view.fail("takes cumulative lengths that do not enter the graph as they are")
    tokens = shape_exprs(view.tensor())[0]
    if not view.sizes.count_tokens(tokens):
        # Pad rows belong to no segment, and masks keep only the tokens' finite.
        raise view.fail(f"runs over {tokens} rows, which is not the token count {view.sizes.token_symbol}")
    if isinstance(view.arg(5), fx.Node):
        raise view.fail("takes a computed scale")
    return Rows(0)


def _dense_attention(view: NodeView) -> State:
    """(batch, heads, tokens, head_dim): entry b of the result comes from entry b of query, key, value and
    mask, or a shared mask, so the tokens of the graph may be the batch. Further results have such entries if
    they have a batch; of others (seeds, offsets) nothing is known.
    """
    if arguments_of(view.node).get("dropout_p"):
        raise view.fail("drops entries at random")
    qkv, masks = view.args[:3], [a for a in view.args[3:] if isinstance(a, fx.Node)]
    state = view.state(qkv[0])
    batches_tokens = isinstance(state, Rows) and state.dim == 0
    if not batches_tokens or any(view.state(a) != state or view.rank(i) < 3 for i, a in enumerate(qkv)):
        raise view.fail("attends across the dimension that counts tokens")
    for mask in masks:
        aligned = view.state(mask) == state and mask.meta["val"].dim() == view.rank()
        if not aligned and view.state(mask) is not SHARED:
            raise view.fail("attends across the dimension that counts tokens")
    results: Any = view.node.meta["val"]
    if isinstance(results, torch.Tensor):
        return state
    unknown = Mixed(f"{view.name} gives nothing that is known beside what was attended to")
    leading = [shape_exprs(r)[0] if isinstance(r, torch.Tensor) and r.dim() > 0 else None for r in results]
    return [state if size is not None and view.sizes.counts_rows(size) else unknown for size in leading]


SIZED_WITH_ROWS = frozenset(("native_group_norm",))
"""These take sizes, which may follow the token count, where they take rows and their rule is asked."""


def _linear(view: NodeView) -> State:
    """mm(x, w), linear(x, w, b), addmm(b, x, w)...: a row of the result is a row of x times a shared matrix,
    and a shared bias. The sum runs over the last dimension of x, which must not be that of the rows.
    """
    of_rows = 1 if "addmm" in view.name else 0
    view.require_shared(1 - of_rows, 2)
    rows = view.rows_of(of_rows)
    if rows.dim == view.rank(of_rows) - 1:
        raise view.fail("contracts the token dimension")
    if view.name == "matmul" and view.rank(1) > 2:
        raise view.fail("multiplies with several matrices")
    return rows


def _batched_product(view: NodeView) -> State:
    """bmm(a, b), baddbmm(c, a, b): entry i of the result is a[i] @ b[i], so tokens may be the batch of both;
    or row j of every product comes from row j of a, so they may be the rows of a with b shared. c is shared
    or added along the same dimension.
    """
    a, b = map(view.state, view.args[:2] if view.name == "bmm" else view.args[1:3])
    a_dim, b_dim = (state.dim if isinstance(state, Rows) else None for state in (a, b))
    if (a_dim == 0 and (b is SHARED or b == a)) or (a_dim == 1 and b is SHARED):
        product = a
    elif a is SHARED and b_dim == 0:
        product = b
    else:
        raise view.fail("multiplies along the token dimension")
    if view.name == "baddbmm" and view.state(view.arg(0)) is not SHARED:
        if view.rows_of().at(view.rows_of().dim + 3 - view.rank()) != product:
            raise view.fail("adds a tensor whose rows are not those of the product")
    return product


def _normalize_trailing(view: NodeView) -> State:
    """layer_norm, rms_norm: (input, normalized_shape, weight, bias, eps): statistics are those of the last
    dimensions, of one row where rows lie before them. Returned statistics keep those dimensions.
    """
    view.require_shared(2, 3)
    if view.rows_of().dim >= view.rank() - len(view.arg(1)):
        raise view.fail("normalizes over tokens")
    return view.each_result(view.rows_of())


_ALONG = _by_operation(
    {
        "runs along the token dimension": "_softmax _log_softmax _safe_softmax softmax",
        "reduces over tokens": """sum mean amax amin argmax argmin prod any all var std var_mean
            linalg_vector_norm""",
        "cuts the token dimension": "split split_with_sizes chunk",
        "cuts windows along the token dimension": "unfold",
        "takes one token": "select",
        "takes tokens apart": "unbind",
        "reverses the tokens": "flip",
        "moves the tokens": "roll",
    }
)
"""What such an operation does to tokens along one of its dimensions."""


def _along(view: NodeView) -> State:
    """softmax(x, dim), flip(x, dims), select(x, dim, index), sum(x, dims)...: an entry of the result comes
    from those along these dimensions, no dims being all: from one row if the rows' is none of them. Only they
    may be gone.
    """
    given = arguments_of(view.node)
    dims = next((given[name] for name in ("dim", "dims", "dimension") if name in given), None)
    along = view.dims(range(view.rank()) if dims is None or dims == [] else dims)
    rows = view.rows_of()
    if rows.dim in along:
        raise view.fail(_ALONG[view.name])
    are_gone = view.output().dim() < view.rank()
    return view.each_result(rows.at(rows.dim - sum(are_gone and dim < rows.dim for dim in along)))


def _scan(view: NodeView) -> State:
    """cumsum(x, dim): an entry comes from those up to its place along `dim`, of its row or of rows before."""
    return Rows(view.rows())


def _over_batch(view: NodeView) -> State:
    """convolution(input, weight, bias, ...) over (batch, channels, *space), im2col, col2im: entry b of the
    result is computed from entry b of the input and the shared weights. Without a batch dimension 0 is one of
    channels.
    """
    view.require_shared(*range(1, len(view.args)))
    rank = {"im2col": 4, "col2im": 3}.get(view.name)
    if view.rank() != (view.rank(1) if rank is None else rank):
        raise view.fail("takes an input without a batch")
    return _first_dimension(view)


def _over_space(view: NodeView) -> State:
    """Pooling, interpolation and padding of the trailing dimensions work on each plane (or line, or volume)
    alone, and dimension 0 counts planes or groups of them. Indices of maxima count within a plane.
    """
    view.require_shared(*range(1, len(view.args)))
    if view.rank() < 3:
        raise view.fail("works along the token dimension")
    return _first_dimension(view)


def _group_norm(view: NodeView) -> State:
    """native_group_norm(input, weight, bias, N, C, HxW, group, eps): statistics are those of a group of
    channels of one of N entries. N has to be the size of dimension 0: memory is read as (N, C, HxW).
    """
    view.require_shared(1, 2)
    given = (view.arg(position) for position in range(3, 7))
    entries, *others = (expression(g.meta["val"] if isinstance(g, fx.Node) else g) for g in given)
    sizes = view.sizes
    if any(map(sizes.varies, others)) or not sizes.are_equal(entries, shape_exprs(view.tensor())[0]):
        raise view.fail("normalizes over tokens")
    return _first_dimension(view)


def _batch_norm(view: NodeView) -> State:
    """(input, weight, bias, running_mean, running_var, ...): a scale and a shift for each channel, dimension
    1. The returned statistics are empty.
    """
    view.require_shared(1, 2, 3, 4)
    if view.rows() == 1:
        raise view.fail("normalizes tokens as channels")
    return [Rows(view.rows()), SHARED, SHARED]


def _first_dimension(view: NodeView) -> State:
    if view.rows() != 0:
        raise view.fail("works along the token dimension")
    return view.each_result(Rows(0))


RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")

_FILLED = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
CONSTRUCTORS = frozenset(("arange", "scalar_tensor", *_FILLED))

_VIEWS = ("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "slice", "select")
_PARTS = ("split", "split_with_sizes", "unbind", "getitem", "cat", "stack", "clone", "_to_copy")
MOVERS = frozenset((*RESHAPES, *_VIEWS, *_PARTS))
"""These only move values about or repeat them."""


def _reshape(view: NodeView) -> State:
    """view(x, sizes): entries keep their order in memory, the last dimension running fastest. Rows along
    `dim` are as many blocks in memory as the dimensions before `dim` have entries, times those within it;
    each begins with the real rows. The dimension of the result that counts tokens holds the blocks that the
    dimensions before it do not tell apart: one, unless it was joined with them.
    """
    rows, sizes = view.rows_of(), view.sizes
    before, after = shape_exprs(view.tensor()), shape_exprs(view.output())
    all_blocks = sympy.Mul(*before[: rows.dim], rows.blocks)
    for dim, size in enumerate(after):
        if sizes.varies(size):
            blocks = sizes.quotient(all_blocks, sympy.Mul(*after[:dim]))
            if blocks is None or sizes.quotient(size, blocks) is None:
                break
            return Rows(dim, blocks)
    raise view.fail(f"from {tuple(before)} to {tuple(after)} joins tokens with an outer dimension")


def _permute(view: NodeView) -> State:
    """permute(x, dims): dimension i of the result is dimension dims[i] of x; transpose(x, a, b) and t
    exchange two dimensions.
    """
    dims = [*range(view.rank())]
    if view.name == "permute":
        dims = [view.dim(d) for d in view.arg(1)]
    elif len(dims) > 1:
        first, second = (0, 1) if view.name == "t" else map(view.dim, view.args[1:3])
        dims[first], dims[second] = second, first
    return view.rows_of().at(dims.index(view.rows_of().dim))


def _unsqueeze(view: NodeView) -> State:
    """unsqueeze(x, at): a dimension of size 1 more, before or after that of the rows."""
    at = int(view.arg(1)) % (view.rank() + 1)
    rows = view.rows_of()
    return rows.at(rows.dim + 1) if at <= rows.dim else rows


def _squeeze(view: NodeView) -> State:
    """squeeze(x, dims): drops dimensions of size 1. One whose size is a symbol stays in the trace, and would
    go in a run where it is 1.
    """
    at = view.dims(view.arg(1, range(view.rank())))
    sizes = shape_exprs(view.tensor())
    if any(not sizes[d].is_Integer for d in at):
        raise view.fail("drops dimensions whose sizes are not fixed")
    rows = view.rows_of()
    return rows.at(rows.dim - sum(1 for d in at if sizes[d] == 1 and d < rows.dim))


def _slice(view: NodeView) -> State:
    """slice(x, dim, start, end, step): the same entries of every row; or all rows."""
    dim, rows = view.dim(view.arg(1, 0)), view.rows_of()
    start, end, step = view.arg(2, 0), view.arg(3), view.arg(4, 1)
    is_whole = start == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= 2**62))
    if dim == rows.dim and not is_whole:
        raise view.fail("cuts the token dimension")
    return rows


def _cat(view: NodeView) -> State:
    """cat(tensors, dim), stack: a row of the result is made of the rows with its number, where tensors are
    not joined along the rows. A tensor without rows has as many only where the trace makes a size fixed.
    """
    tensors = view.arg(0)
    states = [view.state(t) for t in tensors]
    all_rows = {s for s in states if isinstance(s, Rows)}
    if len(all_rows) != 1:
        raise view.fail("joins tensors whose token dimensions differ")
    rows = all_rows.pop()
    dim = int(view.arg(1, 0)) % view.output().dim()
    if view.name == "stack":
        return rows.at(rows.dim + 1) if dim <= rows.dim else rows
    if dim == rows.dim:
        raise view.fail("appends along the token dimension")
    return rows


def _pad(view: NodeView) -> State:
    """constant_pad_nd(x, amounts), a pair for each dimension from the last: constants around every row."""
    rows, padding = view.rows(), list(view.arg(1))
    index = 2 * (view.rank() - 1 - rows)
    if index < len(padding) and (padding[index], padding[index + 1]) != (0, 0):
        raise view.fail("pads the token dimension")
    return Rows(rows)


def _constructor(view: NodeView) -> State:
    """arange, zeros, full...: an entry is a constant, or for arange start + step times its place; so a longer
    tensor begins with the shorter one, unless start, step or constant were made from the count.
    """
    dim = view.varying_dim()
    fill = {"full": 1, "new_full": 2, "scalar_tensor": 0}.get(view.name)
    if fill is not None and isinstance(view.arg(fill), fx.Node):
        raise view.fail("fills with a computed value")
    if view.name == "arange":
        start, step = (0, 1) if len(view.node.args) == 1 else (view.arg(0), view.arg(2, 1))
        if dim is None and reads_token_count(view.node, view.sizes):
            raise view.fail("makes values from the token count")
        if dim is not None and (isinstance(start, fx.Node) or start != 0):
            raise view.fail("counts from a start that is not 0")
        if dim is not None and isinstance(step, fx.Node):
            raise view.fail("counts in computed steps")
    return SHARED if dim is None else Rows(dim)


SIZED = frozenset((*CONSTRUCTORS, *COPIES, *RESHAPES, "varlen_attention"))
"""These take sizes, which may follow the token count: their rules and the sizes of their results decide."""


RULES: dict[str, Rule] = _by_operation(
    {
        pointwise: "floor_divide",  # which torch does not tag
        _same: """alias clone contiguous detach _to_copy to lift_fresh_copy zeros_like ones_like empty_like
            full_like view_as_real view_as_complex""",
        _triangle: "tril triu",
        _expand: "expand",
        _repeat: "repeat",
        _index: "index _unsafe_index index_select embedding",
        _permute_rows: "fxsplit::permute_rows",
        _varlen_attention: "varlen_attention",
        _dense_attention: " ".join(DENSE_ATTENTIONS),
        _linear: "mm matmul linear fxsplit::linear fxsplit::fixed_linear addmm fxsplit::addmm_gelu",
        _batched_product: "bmm baddbmm",
        _normalize_trailing: "native_layer_norm layer_norm _fused_rms_norm rms_norm",
        _scan: "cumsum cumprod logcumsumexp",
        _along: " ".join(_ALONG),
        _over_batch: "convolution im2col col2im",
        _over_space: """avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices
            _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
            upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
            upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
            _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bicubic2d_aa
            _upsample_bilinear2d_aa reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
            replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle""",
        _group_norm: "native_group_norm",
        _batch_norm: "_native_batch_norm_legit_no_training",
        _reshape: " ".join(RESHAPES),
        _permute: "permute transpose t",
        _unsqueeze: "unsqueeze",
        _squeeze: "squeeze",
        _slice: "slice",
        _cat: "cat stack",
        _pad: "constant_pad_nd",
        _constructor: " ".join(CONSTRUCTORS),
    }
)
"""The rules by the names of `operation`. Operations that torch tags as pointwise have `pointwise`."""
