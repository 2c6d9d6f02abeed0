"""Reductions, normalizations and scans."""

from __future__ import annotations

from fxsplit_encoder.compile.padding.rules.registry import rule
from fxsplit_encoder.compile.padding.states import NodeView, Rows, State, named


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
