"""Reductions, normalisations and scans, along any dimension but that of the tokens."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _normalise_trailing(view: NodeView) -> State:
    """layer_norm, rms_norm: (input, normalized_shape, weight, bias, eps)."""
    view.require_shared(2, 3)
    if view.rows() >= view.rank() - len(view.arg(1)):
        raise view.fail("normalises over tokens")
    return view.each_result(Rows(view.rows()))


@rule("_softmax", "_log_softmax", "softmax", "cumsum", "cumprod")
def _along_dim(view: NodeView) -> State:
    """softmax, cumsum: (input, dim)."""
    if view.dim(view.arg(1)) == view.rows():
        raise view.fail("runs along the token dimension")
    return Rows(view.rows())


@rule("sum", "mean", "amax", "amin", "argmax", "argmin", "prod", "any", "all")
@rule("var", "std", "var_mean", "linalg_vector_norm")
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
    return view.each_result(Rows(rows if kept else rows - sum(1 for d in reduced if d < rows)))
