"""Operations that treat every entry of dimension 0 alone: convolution, pooling, interpolation."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State


@rule("convolution", "conv1d", "conv2d", "conv3d", "im2col", "native_group_norm")
@rule("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d")
@rule("upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d")
@rule("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa")
def _batched(view: NodeView) -> State:
    view.require_shared(*range(1, len(view.args)))
    if view.rows() != 0:
        raise view.fail("works along the token dimension")
    return view.each_result(Rows(0))
