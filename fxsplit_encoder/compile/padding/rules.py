"""The padding rules of operations: which dimension of a result is independent, and why (the lemma)."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from fxsplit_encoder.compile.padding.states import (
    SEGMENTS,
    SHARED,
    Mixed,
    NodeView,
    Rows,
    State,
    named,
    operation,
    reads_token_count,
    rule,
)
from fxsplit_encoder.compile.sizes import expression, shape_exprs

COPIES = frozenset(("expand", "repeat"))
"""These make rows out of what has none."""


_DIVISIONS = frozenset(("div", "divide", "floor_divide", "remainder", "fmod"))


@rule("floor_divide")  # which torch does not tag
def pointwise(view: NodeView) -> State:
    """An entry of the result comes from one entry of each argument: the one at the same place, or at 0 of a
    broadcast dimension. So with rows along one dimension, not broadcast, in all arguments that have any, and
    the others shared, the result has rows there.

    This is the rule of operations that torch tags as pointwise, so they are not registered by name.
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


@rule("alias", "clone", "contiguous", "detach", "_to_copy", "to", "lift_fresh_copy")
@rule("zeros_like", "ones_like", "empty_like", "full_like", "view_as_real", "view_as_complex")
def _same(view: NodeView) -> State:
    """The same entries in another dtype or memory, or constants of the same shape. The last dimension of a
    complex number's parts comes after that of the rows.
    """
    rows = view.rows_of()
    if view.name == "view_as_complex" and rows.dim == view.rank() - 1:
        raise view.fail("takes tokens for the parts of complex numbers")
    return rows


@rule("tril", "triu")
def _triangle(view: NodeView) -> State:
    """tril(x, diagonal): an entry is kept or zeroed by its place in the last two dimensions, whose sizes
    padding does not change where the rows lie before them.
    """
    if view.rows() >= view.rank() - 2:
        raise view.fail("keeps entries by their place among the tokens")
    return Rows(view.rows())


@rule("expand")
def _expand(view: NodeView) -> State:
    """expand(x, sizes): entry (..., i, ...) is that of x at the same place, or at 0 where x has one. Rows
    stay where they were, counted from the last dimension; of what is shared, more copies begin with fewer.
    """
    if view.state(view.arg(0)) is SHARED:
        return _copies(view)
    rows = view.rows_of()
    return rows.at(rows.dim + view.output().dim() - view.rank())


@rule("repeat")
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


@rule("unfold")
def _unfold(view: NodeView) -> State:
    """unfold(x, dim, size, step): windows along `dim`, whose entries become the last dimension. Each row of
    another dimension is cut into windows of its own.
    """
    dim, rows = view.dim(view.arg(1)), view.rows()
    if dim == rows or view.rank() == 0:
        raise view.fail("cuts windows along the token dimension")
    return Rows(rows)


def _copies(view: NodeView) -> State:
    """What the tokens do not change, once a token (a class token) or once in all."""
    dim = view.varying_dim()
    return SHARED if dim is None else Rows(dim)


DENSE_ATTENTIONS = (
    "dense_attention",
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
ATTENTIONS = frozenset(("varlen_attention", *DENSE_ATTENTIONS))

_PERMUTE_ROWS = "fxsplit::permute_rows"


def _require_safe_lookup(view: NodeView) -> None:
    """Raises NotProvedError unless indices of pad rows are those of an input, zeros, which are in range."""
    indices = [i for a in view.node.args[1:] for i in (a if isinstance(a, list | tuple) else [a])]
    if not all(_is_an_input(view, index) for index in indices if isinstance(index, fx.Node)):
        raise view.fail("looks up computed indices, which may be out of range in pad rows")


def _is_an_input(view: NodeView, node: fx.Node) -> bool:
    if view.state(node) is SHARED:
        return True
    if node in view.seeds:
        return not node.meta["val"].is_floating_point()
    return operation(node) in MOVERS and all(_is_an_input(view, each) for each in node.all_input_nodes)


@rule("embedding")
def _embedding(view: NodeView) -> State:
    """embedding(table, indices): the entry of an index is the table's row of that number."""
    view.require_shared(0)
    _require_safe_lookup(view)
    return Rows(view.rows(1))


@rule("index", "_unsafe_index")
def _index(view: NodeView) -> State:
    """x[indices]: rows of indices into a shared table, each of which gives its own entries; or rows whose
    other dimensions are indexed by what is shared. Indices into rows would let tokens read one another.
    """
    indices = view.arg(1)
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
    """Rows whose other dimensions are indexed. What several indices give takes the place of the first if they
    stand side by side, else it comes first.
    """
    rows = view.rows()
    if rows < len(indices) and indices[rows] is not None:
        raise view.fail("gathers tokens")
    if any(view.state(i) is not SHARED for i in given):
        raise view.fail("gathers entries of every row by indices of its own")
    places = [place for place, index in enumerate(indices) if index is not None]
    rank = max(i.meta["val"].dim() for i in given)
    side_by_side = places == list(range(places[0], places[-1] + 1))
    before = sum(1 for place in places if place < rows)
    moved_in = rank if before or not side_by_side else 0
    return Rows(rows - before + moved_in)


@rule("index_select")
def _index_select(view: NodeView) -> State:
    """index_select(x, dim, indices): a shared table looked up by rows, or the same entries of every row."""
    dim = view.dim(view.arg(1))
    if view.state(view.arg(0)) is not SHARED:
        if view.state(view.arg(2)) is not SHARED or dim == view.rows():
            raise view.fail("gathers tokens")
        return Rows(view.rows())
    if dim != 0:
        raise view.fail("gathers with a pattern that is not one lookup a row")
    _require_safe_lookup(view)
    return Rows(view.rows(2))


@rule(_PERMUTE_ROWS)
def _permute_rows(view: NodeView) -> State:
    """permute_rows(rows, permutation): permutes the real rows among themselves, as the op promises of a
    permutation that enters the graph as it is: padding only appends to it.
    """
    if view.rows(0) != 0 or view.rows(1) != 0 or view.arg(1) not in view.seeds:
        raise view.fail("takes a permutation of rows that does not enter the graph as it is")
    return Rows(0)


@rule("varlen_attention")
def _varlen_attention(view: NodeView) -> State:
    """varlen_attention(query, key, value, cu_seqlens, max_seqlen, scale): a row attends to the rows of its
    segment. The segments of the unpadded run hold real rows only, and are followed by empty ones; so a real
    row reads the same rows, whatever the bound on the longest segment.
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


@rule(*DENSE_ATTENTIONS)
def _dense_attention(view: NodeView) -> State:
    """(batch, heads, tokens, head_dim): entry b of the result comes from entry b of query, key, value and
    mask, so with the tokens of the graph as the batch its first entries come from real ones alone. A mask
    without a batch, or of one, is the same for all. Further results are such entries if they have one for
    each of the batch; of others (seeds, offsets) nothing is known.
    """
    if named(view.node, "dropout_p"):
        raise view.fail("drops entries at random")
    qkv, others = view.args[:3], [*view.args[3:], *view.node.kwargs.values()]
    masks = [a for a in others if isinstance(a, fx.Node)]
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
    return [_result_state(view, state, result) for result in results]


def _result_state(view: NodeView, state: Rows, result: Any) -> State:
    counts_rows = isinstance(result, torch.Tensor) and result.dim() > 0
    if counts_rows and view.sizes.counts_rows(shape_exprs(result)[0]):
        return state
    return Mixed(f"{view.name} gives nothing that is known beside what was attended to")


SIZED_WITH_ROWS = frozenset(("native_group_norm",))
"""These take sizes, which may follow the token count, where they take rows and their rule is asked."""


@rule("mm", "matmul", "linear", "fxsplit::linear", "fxsplit::fixed_linear")
def _linear(view: NodeView) -> State:
    """mm(x, w), linear(x, w, b), fixed_linear(x, w, b): a row of the result is a row of x times a shared
    matrix. The sum runs over the last dimension of x, which must not be that of the rows.
    """
    view.require_shared(1, 2)
    if view.rows_of().dim == view.rank() - 1:
        raise view.fail("contracts the token dimension")
    if view.name == "matmul" and view.rank(1) > 2:
        raise view.fail("multiplies with several matrices")
    return view.rows_of()


@rule("addmm", "fxsplit::addmm_gelu")
def _addmm(view: NodeView) -> State:
    """addmm(b, x, w): rows of x times a shared matrix, and a shared bias."""
    view.require_shared(0, 2)
    if view.rows_of(1).dim != 0:
        raise view.fail("contracts the token dimension")
    return view.rows_of(1)


@rule("bmm")
def _batched_product(view: NodeView) -> State:
    """bmm(a, b): entry i of the result is a[i] @ b[i], so tokens may be the batch of both; or row j of every
    product comes from row j of a, so they may be the rows of a with b shared.
    """
    return _product(view, view.state(view.arg(0)), view.state(view.arg(1)))


@rule("baddbmm")
def _batched_product_and_sum(view: NodeView) -> State:
    """baddbmm(c, a, b): as bmm, with c shared or added along the same dimension."""
    product = _product(view, view.state(view.arg(1)), view.state(view.arg(2)))
    added = view.state(view.arg(0))
    if added is not SHARED and view.rows_of().at(view.rows_of().dim + 3 - view.rank()) != product:
        raise view.fail("adds a tensor whose rows are not those of the product")
    return product


def _product(view: NodeView, a: State, b: State) -> State:
    a_dim, b_dim = (state.dim if isinstance(state, Rows) else None for state in (a, b))
    if a_dim == 0 and (b is SHARED or b == a):
        return a
    if a is SHARED and b_dim == 0:
        return b
    if a_dim == 1 and b is SHARED:
        return a
    raise view.fail("multiplies along the token dimension")


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _normalize_trailing(view: NodeView) -> State:
    """layer_norm, rms_norm: (input, normalized_shape, weight, bias, eps): statistics are those of the last
    dimensions, and so each row's own where it lies before them. Returned statistics keep those dimensions.
    """
    view.require_shared(2, 3)
    if view.rows_of().dim >= view.rank() - len(view.arg(1)):
        raise view.fail("normalizes over tokens")
    return view.each_result(view.rows_of())


@rule("_softmax", "_log_softmax", "softmax")
def _softmax(view: NodeView) -> State:
    """softmax(x, dim): an entry is divided by a sum along `dim`, which is in its own row."""
    if view.dim(view.arg(1)) == view.rows_of().dim:
        raise view.fail("runs along the token dimension")
    return view.rows_of()


@rule("cumsum", "cumprod", "logcumsumexp")
def _scan(view: NodeView) -> State:
    """cumsum(x, dim): an entry comes from those up to its place along `dim`: in its own row, or along the
    rows in those before it, which for a real row are real.
    """
    return Rows(view.rows())


@rule("sum", "mean", "amax", "amin", "argmax", "argmin", "prod", "any", "all")
@rule("var", "std", "var_mean", "linalg_vector_norm")
def _reduce(view: NodeView) -> State:
    """sum, mean, amax, var...: an entry comes from those along the dims, all of one row where the rows'
    dimension is not among them. No dims are all.
    """
    dims = named(view.node, "dim")
    listed = (
        list(range(view.rank()))
        if dims is None or dims == []
        else dims
        if isinstance(dims, list | tuple)
        else [dims]
    )
    reduced = {view.dim(d) for d in listed}
    rows = view.rows_of()
    if rows.dim in reduced:
        raise view.fail("reduces over tokens")
    kept = view.output().dim() == view.rank()
    gone = 0 if kept else sum(1 for d in reduced if d < rows.dim)
    return view.each_result(rows.at(rows.dim - gone))


@rule("convolution")
def _convolution(view: NodeView) -> State:
    """convolution(input, weight, bias, ...) over (batch, channels, *space): entry b of the result is computed
    from entry b of the input and the shared weights. So is that of a transposed one.
    """
    view.require_shared(*range(1, len(view.args)))
    if view.rank() != view.rank(1):
        raise view.fail("takes an input without a batch")
    return _first_dimension(view)


@rule("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
@rule("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
@rule("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa")
@rule("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
@rule("pixel_shuffle", "pixel_unshuffle")
def _over_space(view: NodeView) -> State:
    """Pooling, interpolation and padding of the trailing dimensions work on each plane (or line, or volume)
    alone, and dimension 0 counts planes or groups of them. Indices of maxima count within a plane. Output
    sizes that follow the token count are refused before.
    """
    view.require_shared(*range(1, len(view.args)))
    if view.rank() < 3:
        raise view.fail("works along the token dimension")
    return _first_dimension(view)


@rule("im2col", "col2im")
def _blocks_of_images(view: NodeView) -> State:
    """im2col, col2im over (batch, ...): the blocks of entry b are cut from, or added up into, entry b alone.
    Without a batch dimension 0 is one of channels.
    """
    view.require_shared(*range(1, len(view.args)))
    if view.rank() != (4 if view.name == "im2col" else 3):
        raise view.fail("takes an input without a batch")
    return _first_dimension(view)


@rule("native_group_norm")
def _group_norm(view: NodeView) -> State:
    """native_group_norm(input, weight, bias, N, C, HxW, group, eps): statistics are those of a group of
    channels of one of N entries. N has to be the size of dimension 0: memory is read as (N, C, HxW).
    """
    view.require_shared(1, 2)
    entries, *others = (expression(_size(view, i)) for i in range(3, 7))
    sizes = view.sizes
    if any(map(sizes.varies, others)) or not sizes.are_equal(entries, shape_exprs(view.tensor())[0]):
        raise view.fail("normalizes over tokens")
    return _first_dimension(view)


@rule("_native_batch_norm_legit_no_training")
def _batch_norm(view: NodeView) -> State:
    """(input, weight, bias, running_mean, running_var, ...): a scale and a shift for each channel, dimension
    1, the same for all entries. The returned statistics of training are empty.
    """
    view.require_shared(1, 2, 3, 4)
    if view.rows() == 1:
        raise view.fail("normalizes tokens as channels")
    return [Rows(view.rows()), SHARED, SHARED]


def _first_dimension(view: NodeView) -> State:
    if view.rows() != 0:
        raise view.fail("works along the token dimension")
    return view.each_result(Rows(0))


def _size(view: NodeView, position: int) -> int:
    value = view.arg(position)
    return value.meta["val"] if hasattr(value, "meta") else value  # type: ignore[no-any-return]


RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")

_FILLED = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
CONSTRUCTORS = frozenset(("arange", "scalar_tensor", *_FILLED))

_VIEWS = ("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "slice", "select")
_PARTS = ("split", "split_with_sizes", "unbind", "getitem", "cat", "stack", "clone", "_to_copy")
MOVERS = frozenset((*RESHAPES, *_VIEWS, *_PARTS))
"""These only move values about or repeat them."""


@rule(*RESHAPES)
def _reshape(view: NodeView) -> State:
    """view(x, sizes): entries keep their order in memory, the last dimension running fastest. Rows along
    `dim` are as many blocks in memory as the dimensions before `dim` have entries, times those within it;
    each begins with what the real rows hold. The one dimension of the result that counts tokens falls into
    the blocks that the dimensions before it do not tell apart: one, unless it was joined with them.
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


@rule("permute")
def _permute(view: NodeView) -> State:
    """permute(x, dims): dimension i of the result is dimension dims[i] of x."""
    permutation = [view.dim(d) for d in view.arg(1)]
    return view.rows_of().at(permutation.index(view.rows_of().dim))


@rule("transpose", "t")
def _transpose(view: NodeView) -> State:
    """transpose(x, a, b), t: two dimensions change places."""
    first, second = (0, 1) if view.name == "t" else (view.dim(view.arg(1)), view.dim(view.arg(2)))
    rows = view.rows_of()
    return rows.at({first: second, second: first}.get(rows.dim, rows.dim)) if view.rank() > 1 else rows


@rule("unsqueeze")
def _unsqueeze(view: NodeView) -> State:
    """unsqueeze(x, at): a dimension of size 1 more, before or after that of the rows."""
    at = int(view.arg(1)) % (view.rank() + 1)
    rows = view.rows_of()
    return rows.at(rows.dim + 1) if at <= rows.dim else rows


@rule("squeeze")
def _squeeze(view: NodeView) -> State:
    """squeeze(x, dims): drops dimensions of size 1. One whose size is a symbol stays in the trace, and would
    go in a run where it is 1.
    """
    dims = view.arg(1)
    listed = range(view.rank()) if dims is None else [dims] if isinstance(dims, int) else dims
    at = {view.dim(d) for d in listed}
    sizes = shape_exprs(view.tensor())
    if any(not sizes[d].is_Integer for d in at):
        raise view.fail("drops dimensions whose sizes are not fixed")
    rows = view.rows_of()
    return rows.at(rows.dim - sum(1 for d in at if sizes[d] == 1 and d < rows.dim))


@rule("flip")
def _flip(view: NodeView) -> State:
    """flip(x, dims): entries in reverse along dims, which are in the same row if the rows' is not one."""
    if view.rows() in {view.dim(d) for d in view.arg(1)}:
        raise view.fail("reverses the tokens")
    return Rows(view.rows())


@rule("roll")
def _roll(view: NodeView) -> State:
    """roll(x, shifts, dims): entries move along dims, within their row if the rows' is not one. Without dims
    the tensor is rolled as one dimension.
    """
    dims = view.arg(2)
    listed = [dims] if isinstance(dims, int) else dims
    if not listed or view.rows() in {view.dim(d) for d in listed}:
        raise view.fail("moves the tokens")
    return Rows(view.rows())


@rule("slice")
def _slice(view: NodeView) -> State:
    """slice(x, dim, start, end, step): the same entries of every row; or all rows."""
    dim, rows = view.dim(view.arg(1, 0)), view.rows_of()
    start, end, step = view.arg(2, 0), view.arg(3), view.arg(4, 1)
    is_whole = start == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= 2**62))
    if dim == rows.dim and not is_whole:
        raise view.fail("cuts the token dimension")
    return rows


@rule("select")
def _select(view: NodeView) -> State:
    """select(x, dim, index): the same entry of every row."""
    dim, rows = view.dim(view.arg(1)), view.rows_of()
    if dim == rows.dim:
        raise view.fail("takes one token")
    return rows.at(rows.dim - 1) if dim < rows.dim else rows


@rule("split", "split_with_sizes", "chunk")
def _split(view: NodeView) -> State:
    """split(x, sizes, dim): parts of every row."""
    dim, rows = view.dim(view.arg(2, 0)), view.rows_of()
    if dim == rows.dim:
        raise view.fail("cuts the token dimension")
    return view.each_result(rows)


@rule("unbind")
def _unbind(view: NodeView) -> State:
    """unbind(x, dim): every entry of each row as a tensor of its own."""
    dim, rows = view.dim(view.arg(1, 0)), view.rows_of()
    if dim == rows.dim:
        raise view.fail("takes tokens apart")
    return view.each_result(rows.at(rows.dim - 1) if dim < rows.dim else rows)


@rule("cat", "stack")
def _cat(view: NodeView) -> State:
    """cat(tensors, dim), stack: a row of the result is made of the rows with its number, where tensors are
    not joined along the rows. A tensor without rows has as many only by chance, where the trace makes a size
    fixed.
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


@rule("constant_pad_nd")
def _pad(view: NodeView) -> State:
    """constant_pad_nd(x, amounts), a pair for each dimension from the last: constants around every row."""
    rows, padding = view.rows(), list(view.arg(1))
    index = 2 * (view.rank() - 1 - rows)
    if index < len(padding) and (padding[index], padding[index + 1]) != (0, 0):
        raise view.fail("pads the token dimension")
    return Rows(rows)


@rule(*CONSTRUCTORS)
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
