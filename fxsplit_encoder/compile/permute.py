"""`fxsplit::permute_rows`: the one way in which a padded forward may permute its rows.

    rows    0 . . . . . . . n . . . . B        permutation[0:n]  of 0 .. n-1
    result  the real rows   | pad rows         permutation[n:B]  anything in range

A gather of rows by rows lets any row depend on any other, so the proof of `compile.padding` refuses it. This
op carries the promise above, which the n real rows need: they stay the first n, and none is computed from a
pad row. The promise is kept where the permutation comes from: it enters a region as it is (the rule asks for
that), a capture refuses one whose entries reach past its own length (`capture.buffers`), and its pad rows are
zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.checks import check

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("permute_rows(Tensor rows, Tensor permutation) -> Tensor")


def _check_lengths(rows: Tensor, permutation: Tensor) -> None:
    check(  # type: ignore[no-untyped-call]
        rows.shape[0] == permutation.shape[0],
        lambda: f"permute_rows: {rows.shape[0]} rows and a permutation of {permutation.shape[0]}",
    )


def _permute(rows: Tensor, permutation: Tensor) -> Tensor:
    """(rows, ...) permuted by (rows,) int64."""
    _check_lengths(rows, permutation)
    return rows.index_select(0, permutation)


_library.impl("permute_rows", _permute, "CompositeExplicitAutograd")


def _fake(rows: Tensor, permutation: Tensor) -> Tensor:
    _check_lengths(rows, permutation)  # which tells a trace that both count tokens
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


torch.library.register_fake("fxsplit::permute_rows", _fake, lib=_library)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.zeros_like(grad).index_add(0, ctx.saved_tensors[0], grad), None


torch.library.register_autograd(
    "fxsplit::permute_rows", _backward, setup_context=_setup_context, lib=_library
)

permute_rows = torch.ops.fxsplit.permute_rows.default
