"""Entries that come from many: products, reductions, normalizations, scans, convolution and pooling."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State, named, rule
from fxsplit_encoder.compile.sizes import expression, shape_exprs

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
    dimensions, as many as the shape has, and so each row's own where it lies before them. The statistics that
    come with the result keep those dimensions, of size 1.
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
    """cumsum(x, dim): an entry comes from those up to its own place along `dim`. Along another dimension
    these are in the entry's own row; along the rows they are in the rows before it, which for a real row are
    real.
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
    """Pooling, interpolation and padding of the trailing dimensions: these work on each plane (or line, or
    volume) of the input alone, and dimension 0 counts planes or groups of them. Indices of maxima count
    within a plane. Output sizes and scales that follow the token count are refused before any rule is asked.
    """
    view.require_shared(*range(1, len(view.args)))
    if view.rank() < 3:
        raise view.fail("works along the token dimension")
    return _first_dimension(view)


@rule("im2col", "col2im")
def _blocks_of_images(view: NodeView) -> State:
    """im2col, col2im over (batch, ...): the blocks of entry b are cut from, or added up into, entry b alone.
    Without a batch dimension 0 is one of channels, which the result joins with the places in a block.
    """
    view.require_shared(*range(1, len(view.args)))
    if view.rank() != (4 if view.name == "im2col" else 3):
        raise view.fail("takes an input without a batch")
    return _first_dimension(view)


@rule("native_group_norm")
def _group_norm(view: NodeView) -> State:
    """native_group_norm(input, weight, bias, N, C, HxW, group, eps): statistics are those of a group of
    channels of one of N entries. N has to be the size of dimension 0: the operation reads memory as
    (N, C, HxW) whatever the shape says.
    """
    view.require_shared(1, 2)
    entries, *others = (expression(_size(view, i)) for i in range(3, 7))
    sizes = view.analysis.sizes
    if any(map(sizes.varies, others)) or not sizes.are_equal(entries, shape_exprs(view.tensor())[0]):
        raise view.fail("normalizes over tokens")
    return _first_dimension(view)


@rule("_native_batch_norm_legit_no_training")
def _batch_norm(view: NodeView) -> State:
    """(input, weight, bias, running_mean, running_var, ...): a scale and a shift for each channel, dimension
    1, which are the same for all entries. The statistics of training that it also returns are empty.
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
