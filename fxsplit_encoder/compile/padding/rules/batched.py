"""Operations that treat every entry of dimension 0 alone: convolution, pooling, interpolation over space."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import SHARED, NodeView, Rows, State
from fxsplit_encoder.compile.sizes import expression, shape_exprs


@rule("convolution")
def _convolution(view: NodeView) -> State:
    """convolution(input, weight, bias, ...) over (batch, channels, *space): entry b of the result is computed
    from entry b of the input and the shared weights. So is that of a transposed one.
    """
    view.require_shared(*range(1, len(view.args)))
    if view.rank() != view.rank(1):
        raise view.unknown("takes an input without a batch")
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
        raise view.unknown("takes an input without a batch")
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
