"""Whether a result is eager's, so closely that rows that mix cannot pass for rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float64: 1e-12, torch.complex64: 1e-5}
"""Relative to the largest entry of a column: with one scale for all, a loud one would hide the others."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a structure."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def difference(got: Any, expected: Any, tolerance: float = 1.0) -> str | None:
    """How a result differs from what is expected, or None.

    Args:
        got, expected: tensors, numbers, or structures of them.
        tolerance: factor of `ROUNDING`.
    """
    ours, spec = torch.utils._pytree.tree_flatten(got)
    theirs, expected_spec = torch.utils._pytree.tree_flatten(expected)
    if spec != expected_spec:
        return f"structure {spec} instead of {expected_spec}"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        reason = _leaf_difference(a, b, tolerance)
        if reason is not None:
            return f"output {number}: {reason}"
    return None


def _leaf_difference(got: Any, expected: Any, tolerance: float) -> str | None:
    if not isinstance(expected, Tensor):
        return None if type(got) is type(expected) and got == expected else f"{got} instead of {expected}"
    if not isinstance(got, Tensor):
        return f"{type(got).__name__} instead of a tensor"
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(got, expected):
        return None
    if expected.dtype not in ROUNDING:
        return f"{int((got != expected).sum())} of {expected.numel()} entries differ"
    return _column_difference(got, expected, tolerance * ROUNDING[expected.dtype])


def _column_difference(got: Tensor, expected: Tensor, tolerance: float) -> str | None:
    """Columns are the last dimension."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (t.to(wide).reshape(-1, t.shape[-1] if t.dim() > 1 else 1) for t in (got, expected))
    if not torch.equal(a.isfinite(), b.isfinite()) or not torch.equal(a.isnan(), b.isnan()):
        return "other entries are finite or NaN"
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return "infinities differ"
    error = torch.where(finite, (a - b).abs(), 0).amax(0)
    scale = torch.where(finite, b.abs(), 0).amax(0)
    wrong = error > tolerance * scale + 1e-9
    if not wrong.any():
        return None
    column = int((error - tolerance * scale).argmax())
    return f"column {column} is off by {error[column]:.3g}; its largest entry is {scale[column]:.3g}"
