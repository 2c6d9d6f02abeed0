"""`fxsplit::linear`: a linear layer and its activation, by the kernel that measured fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.current_device import on_device
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.products.choice import current_product_chooser
from fxsplit_encoder.products.shape import ACTIVATIONS, features_after


def multiply(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
    """`activation(rows @ weight.T + bias)`.

    Args:
        rows_MK: (rows, in_features).
        weight_NK: (out_features, in_features).
        bias_N: (out_features,).
        activation: one of `ACTIVATIONS`.

    Returns:
        (rows, `features_after` the activation), contiguous.

    Raises:
        InputError: sizes do not fit, or there is no such activation.
    """
    _check(rows_MK, weight_NK, bias_N, activation)
    rows = rows_MK if rows_MK.stride(1) == 1 else rows_MK.contiguous()
    weight = weight_NK.contiguous()
    with on_device(rows.device):
        kernel = current_product_chooser().of(rows, weight, bias_N, activation)
        return kernel(rows, weight, bias_N, activation)


def _check(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise InputError(
            f"fxsplit::linear: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1]:
        raise InputError(
            "fxsplit::linear: expected rows (M, K) and weight (N, K), got "
            f"{tuple(rows.shape)} and {tuple(weight.shape)}; flatten what comes before the features"
        )
    if activation == "swiglu" and weight.shape[0] % 2:
        raise InputError(
            f"fxsplit::linear: swiglu: expected an even number of rows of the weight, got {weight.shape[0]}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(f"fxsplit::linear: bias: expected ({weight.shape[0]},), got {tuple(bias.shape)}")


_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor rows, Tensor weight, Tensor? bias, str activation) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("linear", multiply, _device)


def _fake(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    _check(rows, weight, bias, activation)
    return rows.new_empty(rows.shape[0], features_after(activation, weight.shape[0]))


torch.library.register_fake("fxsplit::linear", _fake, lib=_library)

linear = torch.ops.fxsplit.linear.default
